"""A profiling run takes the memory that a step takes: as much of it is compared with steps that are measured."""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

from attnplug import Requirements
from attnplug.contract import Layer, Limits, Parallel
from attnplug.ops import ranks
from attnplug_flash_attn import builder as building
from attnplug_flash_attn import dcp
from attnplug_flash_attn import impl as running
from attnplug_flash_attn.kernels.interface import Kernels
from plugins.flash_attn.tests.exact_backend import make_backend
from plugins.flash_attn.tests.varlen_requests import kernels
from tests.backends.harness import Harness

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

ROWS = 1024
ASKED = {"num_q_heads": 16, "num_kv_heads": 2, "head_size": 128, "return_lse": True}


class Hollow(Kernels):
    """Writes zeros, and takes no memory but for its results where it does not fill the output."""

    fills_output = True

    def attend(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *rest: Any) -> None:
        *_, lse = rest
        found = out if self.fills_output else torch.empty_like(out)
        sums = None if self.fills_output else torch.empty(out.shape[1], out.shape[0])
        out.copy_(found.zero_())
        if lse is not None:
            lse.copy_(torch.zeros(()) if sums is None else sums.zero_().T)


class Copying(Hollow):
    """Returns new tensors."""

    fills_output = False


class Together:
    """Ranks that have the same numbers, in one process: memory is taken as by an exchange."""

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        self.size, self.rank = parallel.dcp_size, parallel.dcp_rank

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous().expand(self.size, *tensor.shape).clone()

    def reduce_scatter(self, parts: Tensor, *, in_order: bool = False) -> Tensor:
        return parts.clone()[0]


class Measured(Harness):
    """A step of ROWS rows whose requests have cached keys."""

    limits = Limits(max_num_reqs=64, max_num_tokens=ROWS, max_seq_len=64)

    def __init__(self, kernels: type[Kernels], **required: Any) -> None:
        ranks = required.get("dcp_size", 1)
        self.backend = make_backend(Requirements(**{"dtype": "bfloat16", "block_size": 16, **ASKED, **required}))
        self.backend.wrapped.kernels = kernels(self.backend.agreement)
        self.impls = [self.backend.make_impl(Layer(name="layers.0"))]
        self.state = self.backend.make_state(self.limits, Parallel(dcp_size=ranks))
        self.builder = self.backend.make_builder(self.impls, self.state)

    def step(self) -> Callable[[], None]:
        """Return what runs it."""
        required, count = self.backend.agreement.requirements, ROWS // 16
        batch = self.batch([16] * count, [32] * count)
        if required.cascade:
            table = batch.block_table.clone()
            table[:, 0] = table[0, 0]
            batch = evolve(batch, block_table=table, block_table_cpu=table, common_prefix_len=16)
        if required.dcp_size > 1:
            nowhere = torch.full_like(batch.slot_mapping, -1)
            shares = batch.seq_lens // required.dcp_size
            more = {"slot_mapping": nowhere, "slot_mapping_cpu": nowhere}
            batch = evolve(batch, dcp_local_seq_lens=shares, dcp_local_seq_lens_cpu=shares, **more)
        metadata, cache = self.builder.build(batch), self.backend.make_cache(200)
        query, output, lse = self.rows()
        keys = torch.zeros(ROWS, 2, 128).bfloat16()
        return lambda: self.impls[0].forward(query, keys, keys, cache, metadata, output, lse=lse)

    def profiled(self) -> Callable[[], None]:
        """Return what runs a profiling run of as many rows."""
        query, output, lse = self.rows()
        keys = torch.zeros(ROWS, 2, 128).bfloat16()
        return lambda: self.impls[0].forward(query, keys, keys, None, None, output, lse=lse)

    @staticmethod
    def rows() -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros(ROWS, 16, 128).bfloat16(), torch.empty(ROWS, 2048).bfloat16(), torch.empty(ROWS, 16)


def peak(run: Callable[[], None], folder: Path) -> int:
    """Return the most bytes that were held at once beyond those that were held before."""
    run()  # what is made once
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    memory = sorted(
        (event["ts"], number, event["args"]) for number, event in enumerate(events) if event["name"] == "[memory]"
    )
    if not memory:
        return 0
    first = memory[0][2]
    return max(each["Total Allocated"] for *_, each in memory) - (first["Total Allocated"] - first["Bytes"])


@pytest.mark.parametrize("kernels", [Hollow, Copying])
@pytest.mark.parametrize(
    "required",
    [
        {},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"cascade": True},
        {"dcp_size": 2},
        {"dcp_size": 4},
        {"dcp_size": 4, "kv_cache_dtype": "fp8_e4m3"},
    ],
    ids=str,
)
def test_a_profiling_run_takes_what_a_step_takes(monkeypatch, tmp_path, kernels, required) -> None:
    monkeypatch.setattr(building, "Ranks", Together)
    # One launch each on a GPU, and of many numbers in float32 here.
    for module, name in ((running, "merge_into"), (running, "write_kv"), (dcp, "merge_into"), (ranks, "weigh")):
        monkeypatch.setattr(module, name, lambda *given: None)
    monkeypatch.setattr(
        running, "quantize_queries", lambda query, _: torch.empty_like(query, dtype=torch.float8_e4m3fn)
    )
    harness = Measured(kernels, **required)

    taken, counted = peak(harness.step(), tmp_path), peak(harness.profiled(), tmp_path)
    small = 2**18  # of a few bytes per row
    assert taken - small <= counted <= 1.5 * taken + small


@pytest.mark.parametrize("variant", ["fa2", "fa2_vllm", "fa3", "fa3_vllm", "fa3_tokenspeed", "fa4", "torch"])
def test_adapters_that_write_elsewhere_say_so(fakes, variant) -> None:
    adapter = kernels(variant)
    copies = "out.copy_" in inspect.getsource(type(adapter))

    assert adapter.fills_output is not copies
