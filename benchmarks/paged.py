"""
Measure paged attention of several backends on a GPU, in turn.

    python benchmarks/paged.py triton/unified flash_attn/fa3_vllm flashinfer/fa3 --out DIR [--seconds 120]
    python benchmarks/paged.py triton/unified --tiles decode,keys=128 --tiles prefill,rows=64,warps=4 --out DIR
    python benchmarks/paged.py triton/unified --block-size 128 --tiles prefill,descriptors=0 --only prefill --out DIR
    python benchmarks/paged.py triton/unified flash_attn/fa3_vllm flashmla --latents --out DIR
    python benchmarks/paged.py triton flashmla --latents --topk 2048 [--kv-cache-dtype fp8_ds_mla] --out DIR

Device times of `forward`, in bfloat16 with 32 query and 8 KV heads of 128: decodes, decodes of 4 tokens, first
prefills, chunks behind 4,096 tokens, and a mixed step; each over that of the second backend, if there are several.
With ``--latents`` keys are latents of 512 elements beside 64 rotary ones, of 16 and 128 query heads. ``--tiles`` adds
the first backend, which is the plugin triton's, with other tile sizes, and writes DIR/tiles.json for `tiles.py`;
``--vllm`` the Triton kernels of an installed vLLM, called as its TRITON_ATTN and TRITON_MLA call them, over the cache
of the first backend. The results so far stay in DIR.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, evolve
from stepwise import NOT_HERE, is_here, measure_all

from attnplug.ops import write_kv
from attnplug_kit.bench import (
    Contender,
    DeviceClock,
    Measurement,
    SectionResult,
    Step,
    Target,
    decodes,
    first_prefills,
    interleaved,
    make_rig,
    mixed,
    setup_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attnplug.contract import Batch, KVCache
    from attnplug_kit.bench import Rig

    Tiles = tuple[str, dict[str, int]]
    Calls = Iterator[tuple[str, Callable[[], Any]]]

NAME = "paged"
_SWITCHES = ("joins_diagonal", "descriptors")


def chunks(requests: int, new: int, cached: int) -> Step:
    """Return a step of requests with as many new tokens behind as many cached ones."""
    what = f"{requests} requests of {new} new tokens behind {cached}"
    return Step(what, (new,) * requests, (cached,) * requests)


STEPS = (
    decodes(64, 4096),
    first_prefills(4, 4096),
    chunks(64, 4, 4092),
    chunks(8, 128, 4096),
    decodes(8, 512),
    decodes(1, 1 << 15),
    mixed(64, 4096, 4, 1024),
    decodes(256, 1024),
)
LATENTS = tuple(
    evolve(
        step,
        what=f"latents, {heads} heads: {step.what}",
        num_q_heads=heads,
        num_kv_heads=1,
        head_size=576,
        head_size_v=512,
        latent=True,
    )
    for step in (decodes(64, 4096), decodes(1, 1 << 15), chunks(64, 4, 4092), chunks(8, 128, 4096))
    for heads in (16, 128)
)


def main() -> int:
    """Measure the requested backends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backends", nargs="+", help="backend/variant")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--tiles", action="append", default=[], type=_tiles, help="decode or prefill, and sizes")
    parser.add_argument("--latents", action="store_true", help="steps of latents")
    parser.add_argument("--topk", type=int, help="of latents: tokens that each one attends to")
    parser.add_argument("--vllm", action="store_true", help="beside the Triton kernels of vLLM")
    parser.add_argument("--only", default="", help="steps whose description has this word")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--block-size", type=int, help="tokens of a page; the agreed ones without it")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit")
    parser.add_argument("--repeats", type=int, default=6, help="as for `attnplug bench`")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [evolve(step, topk=options.topk) for step in (LATENTS if options.latents else STEPS)]
    here = [name for name in options.backends if is_here(Target(name, "cuda"), chosen[0].requirements("bfloat16"))]
    if not here:
        return NOT_HERE
    tried = Tried(options.out / "tiles.json", options.tiles)
    engine = {"kv_cache_dtype": options.kv_cache_dtype, "block_size": options.block_size}
    more = _with_kernels_of_vllm if options.vllm else _nothing_more
    measure = partial(_measure, here, tried, more, engine, options.repeats)
    steps = [(step.what, partial(measure, step)) for step in chosen if options.only in step.what]
    command = " ".join(["python benchmarks/paged.py", *sys.argv[1:]])
    return 1 if measure_all(steps, command, options.out / NAME, options.seconds).failures else 0


def _tiles(text: str) -> Tiles:
    kernel, *sizes = text.split(",")
    given = {name: int(size) for name, _, size in (each.partition("=") for each in sizes)}
    return kernel, {name: bool(size) if name in _SWITCHES else size for name, size in given.items()}


class Tried:
    """
    The tile sizes that are tried, and their times, which a file keeps.

    Args:
        file: The file.
        tiles: Kernels with other tile sizes.
    """

    def __init__(self, file: Path, tiles: Sequence[Tiles]) -> None:
        self.file, self.tiles = file, tiles
        self.rows: list[dict[str, Any]] = []

    def calls(self, rig: Rig) -> Calls:
        """Yield the calls of the plugin triton with other tile sizes, but for those that exceed shared memory."""
        from triton.runtime.errors import OutOfResources  # noqa: PLC0415 - where its kernels are measured

        backend: Any = rig.backend.wrapped
        for kernel, sizes in self.tiles:
            name = f"{kernel}_tiles"
            kept = getattr(backend, name)
            setattr(backend, name, evolve(kept, **sizes))
            call = evolve(rig, metadata=rig.builder.build(rig.batch())).forward()
            setattr(backend, name, kept)
            try:
                call()
            except OutOfResources as error:
                print(f"{_words(kernel, sizes)}: {error}", file=sys.stderr)
            else:
                yield _words(kernel, sizes), call

    def keep(self, step: str, rig: Rig, name: str, seconds: Mapping[str, Sequence[float]]) -> None:
        """Write the times of a step: of each kernel with its usual tile sizes, as `name`, and with the others."""
        backend: Any = rig.backend.wrapped
        of_step = {"step": step, "device": rig.backend.device_properties.name, "triton": version("triton")}
        for kernel in sorted({kernel for kernel, _ in self.tiles}):
            usual, key = getattr(backend, f"{kernel}_tiles"), asdict(backend.tile_key(kernel))
            others = {_words(each, sizes): evolve(usual, **sizes) for each, sizes in self.tiles if each == kernel}
            for words, tiles in ({name: usual} | others).items():
                if words not in seconds:  # they do not fit
                    continue
                self.rows.append({"key": key, "tiles": asdict(tiles), "seconds": median(seconds[words]), **of_step})
            self.file.write_text(json.dumps(self.rows, indent=1), encoding="utf-8")


def _words(kernel: str, sizes: dict[str, int]) -> str:
    return f"{kernel} with {', '.join(f'{name} {size}' for name, size in sizes.items())}"


def _measure(
    backends: Sequence[str],
    tried: Tried,
    more: Callable[[Rig], Calls],
    engine: dict[str, Any],
    repeats: int,
    step: Step,
) -> SectionResult:
    length = step.query_lens[0] if step.query_lens[0] <= 8 else 1  # drafts, not chunks
    rigs = {name: make_rig(step, Target(name, "cuda"), decode_query_len=length, **engine) for name in backends}
    first = rigs[backends[0]]
    calls = {name: rig.forward() for name, rig in rigs.items()} | dict(tried.calls(first)) | dict(more(first))
    expected = first.forward()().clone()
    for name, call in calls.items():
        torch.testing.assert_close(call(), expected, rtol=0.1, atol=0.05, msg=lambda text, name=name: f"{name}: {text}")
    contenders = {name: Contender(lambda _, call=call: call()) for name, call in calls.items()}
    samples = interleaved(contenders, DeviceClock(), repeats)
    tried.keep(step.what, first, backends[0], samples.seconds)
    numbers = [Measurement(NAME, f"{step.what}: {name}", samples.seconds[name], "ms") for name in calls]
    reference = backends[min(1, len(backends) - 1)]
    numbers += [
        Measurement(NAME, f"{step.what}: {name} / {reference}", samples.ratio(name, reference), "x", paired=True)
        for name in calls
        if name != reference
    ]
    return SectionResult(tuple(numbers), setup_of(first.backend))


def _nothing_more(rig: Rig) -> Calls:
    del rig
    yield from ()


def _with_kernels_of_vllm(rig: Rig) -> Calls:
    """Yield the calls of vLLM's Triton backends that serve the step, behind the same cache write."""
    step, cache, query = rig.step, rig.cache, rig.query
    output = torch.empty_like(rig.output).view(step.num_tokens, step.num_q_heads, -1)
    given: Any = _latents_in_vllm if step.latent else _attention_in_vllm
    if cache is None or step.topk or cache.k.dtype != query.dtype or (step.latent and not step.is_decode):
        return
    attend = given(rig, cache, rig.metadata.batch, output)

    def call() -> torch.Tensor:
        write_kv(rig.key, rig.value, cache.k, cache.v, rig.slots)
        attend()
        return output.view(step.num_tokens, -1)

    yield "vLLM", call


def _attention_in_vllm(rig: Rig, cache: KVCache, batch: Batch, output: torch.Tensor) -> Callable[[], object]:
    """Return the call of TRITON_ATTN, with its builder's segments of short queries."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention  # noqa: PLC0415 - where it is measured

    step, segments = rig.step, 16
    threshold = 128 // step.num_kv_heads  # requests that its kernel splits
    partial_sums = [output.new_empty(threshold, step.num_q_heads, segments, dtype=torch.float32) for _ in range(2)]
    scales = output.new_ones(1, dtype=torch.float32).expand(step.num_reqs, step.num_kv_heads)
    return partial(
        unified_attention,
        rig.query,
        cache.k,
        cache.v,
        output,
        batch.query_start_loc,
        max(step.query_lens),
        batch.seq_lens,
        max(step.seq_lens),
        step.scale,
        True,  # noqa: FBT003 - causal
        (-1, -1),
        batch.block_table,
        0,
        None,
        scales,
        scales,
        seq_threshold_3D=threshold,
        num_par_softmax_segments=segments,
        softmax_segm_output=partial_sums[0].new_empty(*partial_sums[0].shape, step.head_size),
        softmax_segm_max=partial_sums[0],
        softmax_segm_expsum=partial_sums[1],
    )


def _latents_in_vllm(rig: Rig, cache: KVCache, batch: Batch, output: torch.Tensor) -> Callable[[], object]:
    """Return the call of TRITON_MLA, with its number of splits."""
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd  # noqa: PLC0415 - likewise

    step = rig.step
    splits = min(1 << (max(step.seq_lens) // 512 - 1).bit_length(), 2 * 132)  # 512 keys each, on 132 multiprocessors
    parts = output.new_empty(step.num_reqs, step.num_q_heads, splits, step.size_v + 1, dtype=torch.float32)
    lse = output.new_empty(step.num_reqs, step.num_q_heads)
    pages = cache.k, cache.k[..., : step.size_v]
    return partial(
        decode_attention_fwd, rig.query, *pages, output, lse, batch.block_table, batch.seq_lens, parts, splits,
        step.scale, rig.block_size, is_mla=True,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
