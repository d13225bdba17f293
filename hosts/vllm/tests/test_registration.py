"""Names in vLLM's enum: which there are, which there are not and why, and how they travel between processes."""

from __future__ import annotations

import copyreg
import pickle
from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug.errors import UnknownBackendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

registry = pytest.importorskip("vllm.v1.attention.backends.registry", reason="needs vLLM")

from attnplug_vllm import names, registration  # noqa: E402 - it needs vLLM to do anything

HOPPER = """
api = "1.0"
backend = { name = "acme", summary = "A backend of a test" }
[supports]
device_type = "cuda"
dtype = ["bfloat16", "float16"]
head_size = { multiple_of = 8, max = 256 }
block_size = [16, { multiple_of = 16 }]
kv_layout = "NHD"
kv_cache_form = "joint"
features = ["paged", "sliding_window"]
[variants.hopper]
[variants.hopper.supports]
compute_capability = "9.0"
[variants.library]
requires = ["acme-kernels-of-no-index >=1"]
[variants.library.supports]
compute_capability = { min = "8.0" }
"""


@pytest.fixture(autouse=True)
def enum(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """VLLM's enum as it was, again after the test."""
    members = registry.AttentionBackendEnum
    tables = ("_member_map_", "_member_names_", "_value2member_map_")
    before = {name: getattr(members, name) for name in tables}
    overrides = dict(registry._ATTN_OVERRIDES)
    for name, value in before.items():
        monkeypatch.setattr(members, name, type(value)(value))
    monkeypatch.setitem(copyreg.dispatch_table, members, copyreg.dispatch_table.get(members, registration._reduce))
    yield members
    for name in set(members._member_map_) - set(before["_member_map_"]):
        type.__delattr__(members, name)  # an enum's own refuses to
    registry._ATTN_OVERRIDES.clear()
    registry._ATTN_OVERRIDES.update(overrides)


@pytest.fixture
def acme(tmp_path: Path) -> Iterator[None]:
    """A backend with one variant for Hopper, and one whose library is not installed."""
    manifest = tmp_path / "attnplug.toml"
    manifest.write_text(HOPPER)
    attnplug.register("a_module_that_is_not_there", manifest=manifest)
    yield
    attnplug.refresh()


def test_attnplug_alone_is_a_choice(enum: Any) -> None:
    registration.register()
    name = names.own_name(())
    assert enum[name].get_class().choice == ()
    assert enum[name].get_class().get_name() == name


def test_registering_again_changes_nothing(enum: Any) -> None:
    registration.register()
    before = dict(enum.__members__)
    registration.register()
    assert dict(enum.__members__) == before


def test_an_unknown_name_says_which_there_are(enum: Any) -> None:
    registration.register()
    with pytest.raises(UnknownBackendError, match="ATTNPLUG_NOPE"):
        enum["ATTNPLUG_NOPE"]
    with pytest.raises(ValueError, match="Unknown attention backend"):
        enum["NOPE"]
    assert not hasattr(enum, "ATTNPLUG_NOPE")


def test_a_member_pickles_by_its_name(enum: Any) -> None:
    registration.register()
    members = [member for member in enum if names.is_own(member)]
    assert members
    assert pickle.loads(pickle.dumps([*members, enum.FLASH_ATTN])) == [*members, enum.FLASH_ATTN]
