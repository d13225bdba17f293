"""Source that was written before handles is rewritten, and then passes core's checks."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from attnplug.contract import AttentionImpl, Backend, check_backend_class
from attnplug.errors import PluginContractError
from attnplug_kit.upgrade import upgrade

if TYPE_CHECKING:
    from pathlib import Path

VENDOR = """\
from attnplug.contract import AttentionImpl, Backend, dummy_layer, warm_up


class Impl(AttentionImpl):
    cache_write = "forward"

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        output.zero_()


class Old(Backend):
    impl_class = Impl

    def warmup(self, shapes):
        self.impl = self.make_impl(dummy_layer(self))
        warm_up(self, [self.dummy_batch(shape) for shape in shapes])  # é: columns are bytes
"""
HOST = """\
from attnplug.contract import AttentionImpl as Impl, Backend, Batch, MetadataBuilder, State
from elsewhere import AttentionImpl


def step(backend: Backend, impl: Impl, other: AttentionImpl, state: State) -> MetadataBuilder:
    return backend.make_builder([impl], state)
"""


def backend_of(source: str) -> type[Backend]:
    names: dict[str, object] = {}
    exec(source, names)  # noqa: S102 - the source above
    found = names["Old"]
    assert isinstance(found, type)
    assert issubclass(found, Backend)
    return found


def test_a_vendors_warm_up_takes_the_handle() -> None:
    with pytest.raises(PluginContractError, match=r"Old\.warmup\(self, shapes\) is called with \(loaded, shapes\)"):
        check_backend_class(backend_of(VENDOR), "old/plain")

    found = upgrade(VENDOR)

    assert "def warmup(self, loaded, shapes):" in found
    assert "self.impl = loaded.make_impl(dummy_layer(loaded))" in found
    assert "warm_up(loaded, [self.dummy_batch(shape) for shape in shapes])  # é" in found
    assert "class Impl(AttentionImpl):" in found
    assert issubclass(check_backend_class(backend_of(found), "old/plain").impl_class, AttentionImpl)
    assert upgrade(found) == found


def test_a_hosts_types_are_those_of_handles() -> None:
    found = upgrade(HOST)

    assert "import Attention as Impl, LoadedBackend, Batch, StepBuilder, Captures" in found
    assert "(backend: LoadedBackend, impl: Impl, other: AttentionImpl, state: Captures) -> StepBuilder:" in found
    assert upgrade(found) == found


def test_files_are_rewritten_in_place(tmp_path: Path) -> None:
    host, other = tmp_path / "host.py", tmp_path / "other.py"
    host.write_text(HOST, "utf-8")
    other.write_text("x = 1\n", "utf-8")

    done = subprocess.run(
        [sys.executable, "-m", "attnplug_kit.upgrade", host, other], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines() == [f"{host}: rewritten", f"{other}: nothing to change"]
    assert host.read_text("utf-8") == upgrade(HOST)
    assert subprocess.run([sys.executable, "-m", "attnplug_kit.upgrade"], check=False).returncode == 2
