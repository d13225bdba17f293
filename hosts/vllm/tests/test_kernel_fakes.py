"""Steps of vLLM on the plugins of kernel libraries, whose fakes check each call as the libraries do."""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch
from vllm.config import CUDAGraphMode

from benchmarks.host_time import NAME, of_vllm
from hosts.vllm.tests.rig import HAS_LAYOUTS, Rig
from plugins.flash_attn.tests.launches import Launches
from tests.backends.fakes import FakeLibraries

PLUGINS = Path(__file__).parents[3] / "plugins"
NO_GPU = ((r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),)


def _register_ops(versions):
    del versions
    if not _ops:
        _ops.extend(importlib.import_module(f"flash_attn_fake.{name}").register() for name in ("vllm_ops", "torch_op"))


def _set_version(versions):
    importlib.import_module("flashinfer").__version__ = versions["flashinfer-python"]


_ops: list = []
FLASH_ATTN = FakeLibraries(
    package="attnplug_flash_attn",
    name="flash_attn_fake",
    folder=PLUGINS / "flash_attn/tests/fakes",
    packages=("flash_attn", "flash_attn_interface", "flash_attn_fake"),
    changes=(
        *NO_GPU,
        (r'name = "flash_attn", aliases = \[[^]]*\]', 'name = "flash_attn_fake"'),
        (r"^compute_capability = .*$", ""),
        (r', compute_capability = "9\.0"', ""),
    ),
    skip_reason=None,
    prepare=_register_ops,
)
FLASHINFER = FakeLibraries(
    package="attnplug_flashinfer",
    name="flashinfer_fake",
    folder=PLUGINS / "flashinfer/tests/fakes",
    packages=("flashinfer",),
    changes=(
        *NO_GPU,
        (r'name = "flashinfer", aliases = \[[^]]*\]', 'name = "flashinfer_fake"'),
        (r'compute_capability = ("[^"]*"|\{[^}]*\}),? ?', ""),
        (r"^min = 128\ndefault = 256$", "min = 1\ndefault = 1"),
    ),
    skip_reason=None,
    prepare=_set_version,
)
VERSIONS = {
    FLASH_ATTN: {"flash-attn": "2.8.3", "vllm": "0.24.0", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b36"},
    FLASHINFER: {"flashinfer-python": "0.6.12"},
}
REPLAYED = (
    "flash_attn/fa2_vllm",
    "flash_attn/fa3",
    "flash_attn/fa3_vllm",
    "flash_attn/fa4",
    "flashinfer/fa2",
    "flashinfer/fa3",
)


@pytest.fixture
def fake(request):
    name, _, variant = request.param.partition("/")
    libraries = FLASH_ATTN if name == "flash_attn" else FLASHINFER
    real = [name for name in libraries.packages if find_spec(name) is not None]
    if real:
        pytest.skip(f"{real} are installed here, and their fakes would be mistaken for them")
    with libraries.environment(VERSIONS[libraries]).active():
        yield f"{libraries.name}/{variant}"
    libraries.close()


def rig_on(fake, layers, **options):
    return Rig(layers, choice=(fake,), head_size=64, dtype=torch.bfloat16, **options)


@pytest.mark.feature("prefill", "chunked prefill", "mixed batches with one-token prompts last")
@pytest.mark.feature("sliding windows beside full layers in one KV-cache group")
@pytest.mark.parametrize("fake", [*REPLAYED, "flash_attn/torch"], indirect=True)
@pytest.mark.parametrize("order", [None, "LBHNC" if HAS_LAYOUTS else "HND"])
def test_mixed_steps(fake, order):
    rig = rig_on(fake, [{}, {"sliding_window": 24}], order=order)
    rig.add(4)
    steps = [[(0, 5), (1, 37), (2, 1)], [(0, 1), (1, 1), (2, 1)], [(0, 1), (1, 9), (3, 1)], [(3, 4), (0, 1)]]
    assert max(rig.run(step, pad_tokens=2) for step in steps) < 2e-2


@pytest.mark.feature("CUDA graphs, FULL_DECODE_ONLY")
@pytest.mark.parametrize("fake", REPLAYED, indirect=True)
def test_graphs(fake):
    rig = rig_on(fake, [{}, {"sliding_window": 24}], mode=CUDAGraphMode.FULL_DECODE_ONLY)
    graph = rig.capture(4)
    rig.add(3)
    rig.run([(0, 5), (1, 37), (2, 1)])
    for _ in range(3):
        assert rig.replay(graph, [(0, 1), (1, 1), (2, 1)], 4) < 2e-2
    assert rig.run([(0, 1), (2, 3)]) < 2e-2


@pytest.mark.parametrize("fake", ["flash_attn/fa3", "flash_attn/fa3_vllm"], indirect=True)
def test_graphs_of_any_batch(fake):
    rig = rig_on(fake, [{}], mode=CUDAGraphMode.FULL)
    graph = rig.capture(8)
    rig.add(3)
    for step in ([(0, 5), (1, 2)], [(0, 1), (1, 1)], [(1, 1), (2, 6)]):
        assert rig.replay(graph, step, 8) < 2e-2


@pytest.mark.parametrize("padded", [0, 2])
@pytest.mark.parametrize("fake", ["flash_attn/fa3_vllm"], indirect=True)
def test_a_build_into_a_graph_takes_few_calls(fake, padded):
    assert fake == f"{NAME}/fa3_vllm"
    step = of_vllm(8, "meta", in_graph=True, padded=padded)
    step.call(step.prepare())
    (given, again), calls, operations = (step.prepare(), step.prepare()), [], Launches()
    before = sys.getprofile()
    gc.disable()  # finalizers of other tests are no calls of this one
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_qualname) if event == "call" else None)
    step.call(given)
    sys.setprofile(before)
    gc.enable()
    with operations:
        step.call(again)

    assert "BatchGuard.check" not in calls
    assert len(calls) <= 66, calls
    compared = {"sub": 1, "amin": 1, "_local_scalar_dense": 1} if padded else {}  # lengths of 0 with queries of 0
    assert operations.found == {"equal": 1, "copy_": 1, **compared}  # the starts; the schedule into its buffer
