"""Activation and restoration: nothing recurses, nothing stays behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from itertools import permutations
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug
import attnplug_torch
from attnplug.torch_backend.impl import TorchImpl
from attnplug_torch import activation, registration
from attnplug_torch.activation import activate
from hosts.torch.tests.reference import counted, native, natively, served, tensors

INPUTS = (1, 2, 8, 64), (1, 2, 8, 64)


class Failing:
    """A handle of another implementation."""

    def __init__(self):
        self.removed = False

    def remove(self):
        self.removed = True


def test_nothing_is_active_before_it_is_activated(registry) -> None:
    sdpa(*tensors(*INPUTS))

    assert "attnplug" in registry.list_flash_attention_impls()
    assert registry.current_flash_attention_impl() is None
    assert counted() == {}


def test_a_backend_that_calls_torch_does_not_recurse(active, monkeypatch) -> None:
    """The built-in backend calls `scaled_dot_product_attention` itself: that call is torch's own."""
    runs, run = [], TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *given: (runs.append(self), run(self, *given))[1])

    sdpa(*tensors(*INPUTS))

    assert len(runs) == 1
    assert counted() == {("torch/sdpa", ""): 1}


def test_calls_inside_torchs_own_operator_are_not_counted(active) -> None:
    inputs = tensors((1, 2, 8, 64), (1, 2, 8, 64), torch.float64)

    sdpa(*inputs)

    assert sum(counted().values()) == 1


def test_what_is_restored_is_torchs_own(active) -> None:
    inputs = tensors(*INPUTS)
    sdpa(*inputs)

    active.restore_flash_attention_impl()
    sdpa(*inputs)
    sdpa(*inputs, dropout_p=1.0)

    assert active.current_flash_attention_impl() is None
    assert counted() == {("torch/sdpa", ""): 1}
    for device_type, names in activation.SERVED.items():
        has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
        present = [name for name in names if hasattr(torch.ops.aten, name)]
        keyed = [name for name in present if has_kernel(f"aten::{name}", device_type)]
        expected = ["_scaled_dot_product_flash_attention_for_cpu"] if device_type == "CPU" else keyed
        assert keyed == expected


def test_activation_may_be_repeated(active) -> None:
    for _ in range(3):
        active.activate_flash_attention_impl("attnplug")
        sdpa(*tensors(*INPUTS))
        active.restore_flash_attention_impl()
    sdpa(*tensors(*INPUTS))

    assert counted() == {("torch/sdpa", ""): 3}


@pytest.mark.parametrize("order", list(permutations(range(3))), ids=str)
def test_handles_may_be_removed_in_any_order(order, registry) -> None:
    handles = [activate() for _ in range(3)]

    for removed, index in enumerate(order):
        sdpa(*tensors(*INPUTS))
        assert served() == removed + 1
        handles[index].remove()
        handles[index].remove()
    sdpa(*tensors(*INPUTS))

    assert served() == 3


def test_a_handle_that_is_gone_ends_nothing(registry) -> None:
    """It was not removed, so that its activation goes on: the next handle may have its address."""
    replacement = activation._REPLACEMENT
    before = set(replacement._handles)
    del_me = [activate()]
    (token,) = replacement._handles - before

    del_me.clear()
    for _ in range(3):
        activate().remove()
        sdpa(*tensors(*INPUTS))

    assert served() == 3
    replacement.discard(token)
    sdpa(*tensors(*INPUTS))
    assert served() == 3


def test_another_implementation_takes_its_place(active) -> None:
    other = Failing()
    active.register_flash_attention_impl("other", register_fn=lambda: other)
    try:
        active.activate_flash_attention_impl("other")
        sdpa(*tensors(*INPUTS))
        assert served() == 0
        active.activate_flash_attention_impl("attnplug")
        sdpa(*tensors(*INPUTS))
        assert (other.removed, served()) == (True, 1)
    finally:
        registration._table().pop("other")


def test_an_implementation_that_does_not_load_leaves_torchs_own(active) -> None:
    def fail():
        raise ImportError

    active.register_flash_attention_impl("other", register_fn=fail)
    try:
        with pytest.raises(ImportError):
            active.activate_flash_attention_impl("other")
        sdpa(*tensors(*INPUTS))
        assert active.current_flash_attention_impl() is None
        assert served() == 0
    finally:
        registration._table().pop("other")


def test_a_failed_activation_replaces_nothing(registry, monkeypatch) -> None:
    kernels = list(activation._kernels())
    monkeypatch.setattr(activation, "_kernels", lambda: [*kernels, ("NoSuchKey", "no_such_operator", print)])

    with pytest.raises(RuntimeError):
        registry.activate_flash_attention_impl("attnplug")
    sdpa(*tensors(*INPUTS))
    monkeypatch.undo()
    registry.activate_flash_attention_impl("attnplug")
    sdpa(*tensors(*INPUTS))

    assert counted() == {("torch/sdpa", ""): 1}


def test_an_error_inside_ends_with_its_call(active, monkeypatch) -> None:
    run = TorchImpl.run

    def fail(*given):
        message = "a kernel failed"
        raise ArithmeticError(message)

    inputs = tensors(*INPUTS)
    monkeypatch.setattr(TorchImpl, "run", fail)
    with pytest.raises(ArithmeticError, match="a kernel failed"):
        sdpa(*inputs)
    monkeypatch.setattr(TorchImpl, "run", run)
    found = sdpa(*inputs)

    assert counted() == {("torch/sdpa", ""): 1}
    torch.testing.assert_close(found, native(*inputs))


def test_threads_call_at_once_and_none_is_inside_another(active) -> None:
    inputs = [tensors((1, 2, 8 + index, 64), (1, 2, 8 + index, 64)) for index in range(4)]
    expected = [native(*one, is_causal=True) for one in inputs]
    found, barrier = {}, threading.Barrier(4)

    def work(index):
        barrier.wait()
        for _ in range(10):
            found[index] = sdpa(*inputs[index], is_causal=True)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()

    assert counted() == {("torch/sdpa", ""): 40}
    for index, one in enumerate(expected):
        torch.testing.assert_close(found[index], one)


def test_threads_activate_and_restore(registry) -> None:
    inputs = tensors(*INPUTS)
    expected = sdpa(*inputs)

    def work():
        for _ in range(5):
            handle = activate()
            torch.testing.assert_close(sdpa(*inputs), expected)
            handle.remove()

    errors = []
    threads = [threading.Thread(target=lambda: _collect(work, errors)) for _ in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()

    assert errors == []
    attnplug_torch.reset()
    sdpa(*inputs)
    assert counted() == {}


def _collect(work, errors):
    try:
        work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
        errors.append(error)


def test_a_name_of_torch_activates_attnplug_until_it_is_given_back(registry) -> None:
    """All that torchtitan calls is the activation of the name that it has for the GPU."""
    before = registration._table()["FA3"]

    assert attnplug_torch.register("FA3") == ("FA3", "attnplug")
    if registry.current_flash_attention_impl() != "FA3":
        registry.activate_flash_attention_impl("FA3")
    sdpa(*tensors(*INPUTS))

    assert registry.current_flash_attention_impl() == "FA3"
    assert served() == 1
    registry.restore_flash_attention_impl()
    attnplug_torch.register("FA3")
    attnplug_torch.unregister()
    assert registration._table()["FA3"] is before


def test_a_name_of_ours_is_removed(registry) -> None:
    attnplug_torch.register("mine")
    attnplug_torch.unregister("mine", "never registered")

    assert "mine" not in registry.list_flash_attention_impls()
    assert attnplug_torch.NAME in registry.list_flash_attention_impls()


def test_a_torch_without_a_registry_is_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(registration, "_table", lambda: None)

    assert attnplug_torch.register("FA3") == ()
    attnplug_torch.unregister()


def test_an_error_of_registration_is_no_error_of_the_import(monkeypatch, capsys) -> None:
    def fail(*names):
        message = "no registry"
        raise RuntimeError(message)

    monkeypatch.setattr(registration, "register", fail)

    registration.autoload()

    assert "attnplug-torch registered nothing with torch: no registry" in capsys.readouterr().err


def test_names_of_the_environment_are_registered(registry, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_ATTNPLUG_IMPLS", "FA4, other ,")

    registration.autoload()

    assert {"FA4", "attnplug", "other"} <= set(registry.list_flash_attention_impls())
    assert registration._table()["FA4"] is registration._activate


PROGRAM = """
import torch
assert "attnplug" not in __import__("sys").modules, "activation alone loads attnplug"
torch.nn.attention.activate_flash_attention_impl("attnplug")
query = torch.randn(1, 2, 8, 64)
torch.nn.functional.scaled_dot_product_attention(query, query, query)
import attnplug_torch
print(*attnplug_torch.report())
"""


@pytest.mark.slow
def test_torch_knows_the_name_without_an_import(tmp_path) -> None:
    """The entry point is written by hand: the metadata of the installed distribution may be another one's."""
    metadata = tmp_path / "attnplug_torch_test-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: attnplug-torch-test\nVersion: 1\n", "utf-8")
    project = Path(__file__).parents[1].joinpath("pyproject.toml").read_text("utf-8")
    assert 'attnplug = "attnplug_torch.registration:autoload"' in project
    (metadata / "entry_points.txt").write_text(
        "[torch.backends]\nattnplug = attnplug_torch.registration:autoload\n", "utf-8"
    )
    folders = [str(tmp_path), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False, env=environment
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1 × scaled_dot_product_attention on cpu: torch/sdpa"  # noqa: RUF001


def test_restoring_what_is_not_active_is_torchs_affair(registry, caplog) -> None:
    with caplog.at_level(logging.WARNING), suppress(RuntimeError):
        registry.restore_flash_attention_impl()

    assert "no custom impl was activated" in caplog.text


def test_scopes_reach_the_calls_of_a_model(active) -> None:
    layer = torch.nn.TransformerEncoderLayer(32, 2, 32, batch_first=True, dropout=0.0)
    rows = torch.randn(1, 5, 32)

    with attnplug.using(backend="flashinfer"), pytest.raises(attnplug.NoBackendError):
        layer(rows)
    with natively(), attnplug.using(backend="flashinfer"):
        layer(rows)
