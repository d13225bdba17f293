"""Which backend a layer gets where plugins fail: another one where attnplug decides, an error where it was named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug.errors import NoBackendError, PluginLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

from attnplug_vllm import facts
from hosts.vllm.tests.backends import fresh_process, offer


@pytest.fixture(autouse=True)
def acme(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A CPU with a backend whose module does not exist, before the built-in one."""
    monkeypatch.setattr(facts, "device", attnplug.Device.cpu)
    monkeypatch.setattr(facts, "current_config", lambda: None)
    monkeypatch.setenv("ATTNPLUG_ALLOW", "acme,torch")
    monkeypatch.setenv("ATTNPLUG_BACKEND", "acme,auto")
    monkeypatch.setattr(facts, "_loaded", set())
    with fresh_process():
        offer(tmp_path)
        yield


def requirements(**changes: Any) -> attnplug.Requirements:
    return facts.layer_requirements(head_size=64, dtype="float32", num_q_heads=4, num_kv_heads=2, **changes)


def test_another_backend_takes_the_place_of_a_broken_one(caplog: pytest.LogCaptureFixture) -> None:
    assert facts.select(requirements(), ()).id == "acme/host"
    facts._log.addHandler(caplog.handler)
    try:
        assert facts.choose(requirements(), ()).id == "torch/sdpa"
    finally:
        facts._log.removeHandler(caplog.handler)
    assert "acme/host failed to load and is left out" in caplog.text
    assert "no_such_module_of_acme" in caplog.text
    assert facts.select(requirements(), ()).id == "torch/sdpa"  # it is known by now


@pytest.mark.parametrize("named", ["by vLLM", "by the setting"])
def test_a_named_broken_backend_is_an_error(named: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if named == "by the setting":
        monkeypatch.setenv("ATTNPLUG_BACKEND", "acme/host")
        attnplug.refresh()
    with pytest.raises(PluginLoadError, match="no_such_module_of_acme"):
        facts.choose(requirements(), ("acme/host",) if named == "by vLLM" else ())
    with pytest.raises(NoBackendError, match="no_such_module_of_acme"):
        facts.choose(requirements(), ("acme/host",))


def test_nothing_is_left_out_under_the_strict_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    attnplug.refresh()
    with pytest.raises(PluginLoadError):
        facts.choose(requirements(), ())


def test_without_another_one_the_failure_is_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_ALLOW", "acme")
    attnplug.refresh()
    with pytest.raises(NoBackendError) as error:
        facts.choose(requirements(), ())
    assert isinstance(error.value.__cause__, PluginLoadError)


def test_a_layer_like_another_is_not_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []
    load = attnplug.Selection.load
    monkeypatch.setattr(attnplug.Selection, "load", lambda self: loads.append(self.id) or load(self))
    for window in (None, None, 16, 16):
        facts.choose(requirements(sliding_window=window), ("torch/sdpa",))
    assert loads == ["torch/sdpa"] * 2
