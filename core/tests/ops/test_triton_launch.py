from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from attnplug.ops import triton as triton_launch
from attnplug.ops import write
from attnplug.ops.triton import Launch, triton_function, triton_works

if TYPE_CHECKING:
    from collections.abc import Iterator


class Kernel:
    """Stands in for a kernel of Triton and for what is compiled of it."""

    def __init__(self) -> None:
        self.calls = []
        self.compiled = {}

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.calls.append((grid, arguments, options))
            return Compiled(self.calls)

        return run


class Compiled:
    def __init__(self, calls) -> None:
        self.calls = calls

    def __getitem__(self, grid):
        return lambda *arguments: self.calls.append(("direct", grid, arguments))


def triton_of(version: str, target) -> SimpleNamespace:
    active = SimpleNamespace(get_current_target=target)
    return SimpleNamespace(
        __version__=version, __spec__=object(), runtime=SimpleNamespace(driver=SimpleNamespace(active=active))
    )


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    caches = (triton_works, triton_function, triton_launch._is_stable, triton_launch._fusion)
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def test_what_is_compiled_is_launched_without_triton_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton_of("3.7.1", object))
    kernel = Kernel()
    launch = Launch(kernel, (7, True), num_warps=2)
    assert not launch.is_compiled

    launch.first((3, 1, 1), "tensor", 5)
    assert launch.is_compiled
    launch.again((4, 1, 1), 1234, 5)

    assert kernel.calls == [
        ((3, 1, 1), ("tensor", 5, 7, True), {"num_warps": 2}),
        ("direct", (4, 1, 1), (1234, 5, 7, True)),
    ]


def test_an_older_triton_looks_at_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton_of("3.5.1", object))
    launch = Launch(Kernel(), ())

    launch.first((1, 1, 1))

    assert not launch.is_compiled


@pytest.mark.parametrize(("version", "said"), [("3.8.0", {}), ("3.9.0", {"enable_fp_fusion": True})])
def test_where_triton_asks_whether_products_and_sums_are_fused_it_is_told(
    monkeypatch: pytest.MonkeyPatch, version: str, said: dict[str, bool]
) -> None:
    monkeypatch.setitem(sys.modules, "triton", triton_of(version, object))
    kernel = Kernel()

    Launch(kernel, (), num_warps=2).first((1, 1, 1))

    assert kernel.calls == [((1, 1, 1), (), {"num_warps": 2, **said})]


def test_without_a_driver_everything_runs_on_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def target() -> None:
        raise RuntimeError("0 active drivers")

    monkeypatch.setitem(sys.modules, "triton", triton_of("3.7.1", target))

    assert not triton_works()
    assert triton_function("attnplug.ops.triton_write", "write") is None
    assert len(caplog.records) == 1
    assert "0 active drivers" in caplog.text


def test_without_triton_nothing_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(triton_launch, "find_spec", lambda name: None)

    assert not triton_works()
    assert not caplog.records


def test_importing_the_operations_imports_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "find_spec", lambda name: pytest.fail("asked on the CPU"))

    write.write_kv(*torch.ones(2, 2, 1, 4), *torch.zeros(2, 2, 4, 1, 4), torch.tensor([4, 5]))


def test_modules_with_kernels_are_not_imported_before_a_gpu_needs_them() -> None:
    code = "import sys, attnplug.ops, attnplug.batching; print(*[name for name in sys.modules if '.triton_' in name])"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "attnplug.ops.triton_write" not in done.stdout
    assert "attnplug.batching.triton_pages" not in done.stdout
