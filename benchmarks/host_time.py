"""
Measure the host time of builds on a machine without a GPU: eager steps, steps into a graph, and steps of vLLM.

    python benchmarks/host_time.py [--out FILE] [--repeats 50] [--requests 8 256] [--only vllm]

The backend is `flash_attn/fa3_vllm` on the fakes of the plugin's tests. Its schedule is one tensor that is made before:
what is left is the time over the library's plan. Tensors of the device are on torch's "meta" device, where operations
do nothing, or on the CPU (`--device cpu`), where they are checked and copied too. All builds take turns in one process;
times are medians. Steps of vLLM are measured where it is installed: metadata made by hand, 16 layers, and no CPU copy
of block table and slots, as on a GPU. In its padded steps a quarter of the requests is padding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace as Names
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from attrs import evolve

import attnplug
from attnplug.contract import Batch, GraphShape, Layer, Limits
from attnplug_kit.bench import Contender, host_clock, interleaved

sys.path.insert(0, str(Path(__file__).parents[1]))  # the fakes and the rig are those of the tests

from plugins.flash_attn.tests.conftest import FAKES, NAME, VERSIONS

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTH, SIZE, HEADS = 1024, 16, {"num_q_heads": 32, "num_kv_heads": 8, "head_size": 64}
LAYERS = 16


def main() -> None:
    """Measure, and print microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="meta", choices=("meta", "cpu"))
    parser.add_argument("--requests", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--repeats", type=int, default=50, help="fifths of a second, at most")
    parser.add_argument("--only", default="", help="measure builds whose name has this text")
    parser.add_argument("--out", type=Path, help="file of the results, as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with FAKES.environment(VERSIONS).active():
        made = {name: make for count in options.requests for name, make in _builds(count, options.device)}
        contenders = {name: make() for name, make in made.items() if options.only in name}
        samples = interleaved(contenders, host_clock("cpu"), options.repeats)
        found = {name: round(statistics.median(seconds) * 1e6, 1) for name, seconds in samples.seconds.items()}
    for name, microseconds in found.items():
        print(f"{name:40} {microseconds:8.1f} us")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    FAKES.close()


def _builds(count: int, device: str) -> Iterator[tuple[str, Any]]:
    """Yield the name of each build, and what prepares it."""
    yield f"eager, {count} decodes", lambda: eager(count, device)
    yield f"graph, {count} decodes", lambda: into_graph(count, device)
    if find_spec("vllm") is None:
        return
    yield f"vllm, eager, {count} decodes", lambda: of_vllm(count, device)
    yield f"vllm, graph, {count} decodes", lambda: of_vllm(count, device, in_graph=True)
    yield f"vllm, padded graph, {count} decodes", lambda: of_vllm(count, device, in_graph=True, padded=count // 4)


def decodes(count: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a step in which all requests decode, each at the same length, in pages of random order."""
    columns, last = LENGTH // SIZE, LENGTH - 6
    table = torch.randperm(count * columns, generator=torch.Generator().manual_seed(0)).int().view(count, columns) + 1
    return {
        "query_start_loc": torch.arange(count + 1, dtype=torch.int32),
        "seq_lens": torch.full((count,), last + 1, dtype=torch.int32),
        "block_table": table,
        "slot_mapping": table[:, last // SIZE].long() * SIZE + last % SIZE,
    }


def placed(backend: Any, device: str) -> Any:
    """Return a backend whose tensors are on a device."""
    if device != "cpu":
        backend.device_properties = backend.wrapped.device_properties = Names(type=device, num_multiprocessors=132)
    return backend


def planned(builder: Any, count: int, device: str) -> Any:
    """Return a builder with one schedule for all steps."""
    schedule = torch.zeros(4 * count + 1, dtype=torch.int32, device=device)
    builder.wrapped._kernels.schedule = lambda *_, **__: schedule  # noqa: SLF001 - what the library takes is not measured
    return builder


def make_builder(count: int, device: str, *, in_graph: bool) -> Any:
    """Return the builder of one layer."""
    level = {"cudagraph": "single_token_decode"} if in_graph else {}
    required = attnplug.Requirements(**HEADS, **level, dtype="bfloat16", block_size=SIZE)
    backend = placed(attnplug.load(required, attnplug.Device.cpu(), backend=f"{NAME}/fa3_vllm"), device)
    limits = Limits(
        max_num_reqs=count,
        max_num_tokens=max(count, 2048),
        max_seq_len=LENGTH,
        num_blocks=1 + count * LENGTH // SIZE,
        capture_sizes=(count,) if in_graph else (),
        max_num_splits=32 if in_graph else None,
    )
    impl = backend.make_impl(Layer(name="layers.0"))
    return planned(backend.make_builder([impl], backend.make_state(limits)), count, device)


def make_batch(count: int, device: str) -> Batch:
    """Return the step, with CPU copies of all tensors."""
    host = decodes(count)
    tensors = host if device == "cpu" else {name: tensor.to(device) for name, tensor in host.items()}
    copies = {f"{name}_cpu": tensor for name, tensor in host.items()}
    sizes = {"num_reqs": count, "num_actual_tokens": count, "max_query_len": 1, "max_seq_len": LENGTH - 5}
    return Batch(**tensors, **copies, **sizes)


def eager(count: int, device: str) -> Contender:
    """Build a step that runs eagerly."""
    builder, batch = make_builder(count, device, in_graph=False), make_batch(count, device)
    return Contender(builder.build, lambda: evolve(batch))


def into_graph(count: int, device: str) -> Contender:
    """Build a step into the buffers of a graph."""
    builder, batch = make_builder(count, device, in_graph=True), make_batch(count, device)
    with builder.state.graph_capture(count):
        graph = builder.state.graph(GraphShape(count, count, 1))
        builder.build(graph.dummy_batch(builder), graph=graph)
    return Contender(lambda batch: builder.build(batch, graph=graph), lambda: evolve(batch))


def of_vllm(count: int, device: str, *, in_graph: bool = False, padded: int = 0) -> Contender:
    """Build a step of vLLM's model runner; the graph reads the runner's tensors."""
    from vllm.config import CUDAGraphMode  # noqa: PLC0415 - it is optional, and takes seconds to import
    from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: PLC0415 - likewise

    import attnplug_vllm.builder as adapter  # noqa: PLC0415 - needs vLLM
    from hosts.vllm.tests import rig as rigs  # noqa: PLC0415 - needs vLLM

    load, mode = adapter.load, CUDAGraphMode.FULL_AND_PIECEWISE if in_graph else None
    with patch.object(adapter, "load", lambda *how: placed(load(*how), device)):
        rig = rigs.Rig(
            [{}] * LAYERS,
            choice=(f"{NAME}/fa3_vllm",),
            num_heads=HEADS["num_q_heads"],
            num_kv_heads=HEADS["num_kv_heads"],
            head_size=HEADS["head_size"],
            block_size=SIZE,
            dtype=torch.bfloat16,
            mode=mode,
            max_num_seqs=count,
            max_model_len=LENGTH,
        )
    builder = rig.builder
    builder._lacks_pools = False  # noqa: SLF001 - those of the rig are on the CPU
    for part in builder.parts:
        planned(part.builder, count, device)
    host = decodes(count)
    own = {name: torch.zeros_like(tensor, device=device) for name, tensor in host.items()}
    kept = {"rig": rig}  # with its layers, which nothing else holds

    def common(starts: torch.Tensor, lens: torch.Tensor) -> Any:
        return CommonAttentionMetadata(
            query_start_loc=own["query_start_loc"],
            query_start_loc_cpu=starts,
            seq_lens=own["seq_lens"],
            seq_lens_cpu_upper_bound=lens,
            num_reqs=count,
            num_actual_tokens=count,
            max_query_len=1,
            max_seq_len=LENGTH - 5,
            block_table_tensor=own["block_table"],
            slot_mapping=own["slot_mapping"],
        )

    if in_graph:
        own["query_start_loc"].copy_(host["query_start_loc"])
        own["seq_lens"].fill_(1)
        own["slot_mapping"].fill_(-1)
        kept["captured"] = builder.build_for_cudagraph_capture(
            common(host["query_start_loc"], torch.ones_like(host["seq_lens"]))
        )
    running = count - padded
    host["query_start_loc"][running + 1 :] = running
    host["seq_lens"][running:] = 0
    host["block_table"][running:] = 0
    host["slot_mapping"][running:] = -1
    for name, tensor in host.items():
        own[name].copy_(tensor)
    metadata = builder.build(0, common(host["query_start_loc"], host["seq_lens"]))
    if any((one.graph is not None) != in_graph for one in metadata.parts.values()):
        raise RuntimeError("the step is not built for the graph")
    return Contender(
        lambda step: (kept, builder.build(0, step))[1],
        lambda: common(host["query_start_loc"].clone(), host["seq_lens"].clone()),
    )


if __name__ == "__main__":
    main()
