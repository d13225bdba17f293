"""Direct calls of FlashInfer, as a host for this library alone writes them: the baseline of the plugin's benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import frozen
from torch import Tensor

from attnplug.ops import write_pages
from attnplug_flashinfer.routes import uses_tensor_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnplug_kit.bench import Planner, Rig

_WORKSPACE = 256 * 2**20  # bytes
_LAYOUT = "NHD"


@frozen
class DirectFlashInfer:
    """The library's append, and its wrappers, with the same kernels as the plugin."""

    backend: ClassVar[str] = "flashinfer"
    what: ClassVar[str] = "direct FlashInfer calls"

    def layer(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the append and the wrapper calls of one planned step."""
        if rig.step.latent:
            return _latent_calls(rig)
        if rig.cache is None:
            return _dense_calls(rig)
        return _calls(rig, _Wrappers.of(rig, captured=False))

    def captured(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the same calls with the wrapper for CUDA graphs. That for latents has the same kernel in both."""
        return _latent_calls(rig) if rig.step.latent else _calls(rig, _Wrappers.of(rig, captured=True))

    def plans(self, planner: Planner, *, captured: bool) -> Mapping[str, Callable[[], object]]:
        """Return the wrappers' `plan`: with page arrays that are ready, and with arrays made from a block table."""
        wrappers, tables = _Wrappers.of(planner, captured=captured), _Tables.of(planner)
        pages = tables.pages()
        return {
            "the direct `plan`": lambda: wrappers.plan(pages),
            "the direct `plan`, with page arrays made from a block table": lambda: wrappers.plan(tables.pages()),
        }


@frozen(eq=False)
class _Pages:
    """
    The page arrays of some requests in the library's format, int32.

    Attributes:
        indptr: ``(num_reqs + 1,)`` on the CPU.
        last_page_len: ``(num_reqs,)`` on the CPU.
        indices: ``(pages,)`` on the device.
    """

    indptr: Tensor
    last_page_len: Tensor
    indices: Tensor

    def part(self, requests: slice) -> _Pages:
        """Return the arrays of a range of requests."""
        last_page_len = self.last_page_len[requests]
        if len(last_page_len) == len(self.last_page_len):
            return self
        first = requests.start or 0
        indptr = self.indptr[first : first + len(last_page_len) + 1]
        return _Pages(indptr - indptr[0], last_page_len, self.indices[int(indptr[0]) : int(indptr[-1])])


@frozen(eq=False)
class _Tables:
    """
    The block table and lengths that a host keeps from step to step.

    Attributes:
        blocks: ``(num_reqs, columns)`` int32 on the CPU.
        seq_lens: ``(num_reqs,)`` int32 on the CPU.
        block_size: Slots per block.
        device: Where the kernels run.
        num_decodes: The number of requests with one new token; they come first.
    """

    blocks: Tensor
    seq_lens: Tensor
    block_size: int
    device: torch.device
    num_decodes: int

    @classmethod
    def of(cls, planner: Planner) -> _Tables:
        step = planner.step
        rows = [torch.tensor(blocks, dtype=torch.int32) for blocks in planner.blocks]
        blocks = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        seq_lens = torch.tensor(step.seq_lens, dtype=torch.int32)
        return cls(blocks, seq_lens, planner.block_size, planner.backend.device, step.query_lens.count(1))

    def whole(self) -> _Pages:
        """Return the page arrays of the step."""
        counts = (self.seq_lens + (self.block_size - 1)) // self.block_size
        indptr = torch.zeros(len(counts) + 1, dtype=torch.int32)
        torch.cumsum(counts, 0, dtype=torch.int32, out=indptr[1:])
        indices = self.blocks[torch.arange(self.blocks.shape[1], dtype=torch.int32) < counts[:, None]]
        return _Pages(indptr, self.seq_lens - (counts - 1) * self.block_size, _to_device(indices, self.device))

    def pages(self) -> tuple[_Pages, _Pages]:
        """Return the page arrays of the decodes and of the prefills."""
        whole = self.whole()
        return whole.part(slice(self.num_decodes)), whole.part(slice(self.num_decodes, None))


@frozen(eq=False)
class _Wrappers:
    """
    The wrappers of a step, and the arguments of their plans besides the page arrays.

    Attributes:
        decode: For requests with one new token; None if the step has no such request.
        prefill: For the other requests; None if there are no others.
        query_start_loc: ``(prefills + 1,)`` int32 on the CPU.
        shared: The keywords that both plans take.
        head_size: The head size.
    """

    decode: Any
    prefill: Any
    query_start_loc: Tensor
    shared: dict[str, Any]
    head_size: int

    @classmethod
    def of(cls, planner: Planner, *, captured: bool) -> _Wrappers:
        step = planner.step
        workspace = _workspace(planner)
        prefills = [length for length in step.query_lens if length > 1]
        has_decodes = len(prefills) < step.num_reqs
        return cls(
            _decode_wrapper(planner, workspace, captured=captured) if has_decodes else None,
            _prefill_wrapper(planner, workspace) if prefills else None,
            _starts(prefills),
            _shared_keywords(planner),
            step.head_size,
        )

    def plan(self, pages: tuple[_Pages, _Pages]) -> None:
        """Plan the step."""
        for_decode, for_prefill = pages
        if self.decode is not None:
            self.decode.plan(
                for_decode.indptr,
                for_decode.indices,
                for_decode.last_page_len,
                head_dim=self.head_size,
                **self.shared,
            )
        if self.prefill is not None:
            self.prefill.plan(
                self.query_start_loc,
                for_prefill.indptr,
                for_prefill.indices,
                for_prefill.last_page_len,
                head_dim_qk=self.head_size,
                causal=True,
                **self.shared,
            )


def _shared_keywords(planner: Planner) -> dict[str, Any]:
    step, dtype = planner.step, _dtype(planner)
    return {
        "num_qo_heads": step.num_q_heads,
        "num_kv_heads": step.num_kv_heads,
        "page_size": planner.block_size,
        "sm_scale": step.scale,
        "q_data_type": dtype,
        "kv_data_type": dtype,
        "o_data_type": dtype,
    }


def _decode_wrapper(planner: Planner, workspace: Tensor, *, captured: bool) -> Any:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # noqa: PLC0415 - takes a second, and loads CUDA

    def buffer(size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=workspace.device)

    requests, buffers = planner.step.num_reqs, {}
    if captured:
        buffers = {
            "use_cuda_graph": True,
            "paged_kv_indptr_buffer": buffer(requests + 1),
            "paged_kv_indices_buffer": buffer(planner.num_blocks),
            "paged_kv_last_page_len_buffer": buffer(requests),
        }
    backend = planner.backend
    tensor_cores = uses_tensor_cores(backend.agreement, backend.device_properties)
    return BatchDecodeWithPagedKVCacheWrapper(
        workspace, _LAYOUT, use_tensor_cores=tensor_cores, backend="fa2", **buffers
    )


def _prefill_wrapper(planner: Planner, workspace: Tensor) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # noqa: PLC0415 - as above

    return BatchPrefillWithPagedKVCacheWrapper(workspace, _LAYOUT, backend=planner.backend.variant)


def _calls(rig: Rig, wrappers: _Wrappers) -> Callable[[], Tensor]:
    from flashinfer import append_paged_kv_cache  # noqa: PLC0415 - as above

    tables, pages = _Tables.of(rig), rig.direct_cache()
    cache = pages.k, pages.v
    wrappers.plan(tables.pages())
    indices = _append_indices(rig, tables)
    query, key, value = rig.query, rig.key, rig.value
    output, first = torch.empty_like(query), tables.num_decodes
    runs = [
        (wrapper.run, query[rows], output[rows])
        for wrapper, rows in ((wrappers.decode, slice(first)), (wrappers.prefill, slice(first, None)))
        if wrapper is not None
    ]

    def call() -> Tensor:
        append_paged_kv_cache(key, value, *indices[:2], cache, *indices[2:], kv_layout=_LAYOUT)
        for run, rows, out in runs:
            run(rows, cache, out=out)
        return output.flatten(1)

    return call


def _latent_calls(rig: Rig) -> Callable[[], Tensor]:
    """
    Return the append of latents and the wrapper's run, over views of the packed cache.

    The library appends rows of the cache's dtype only: `attnplug.ops.write_pages` writes latents in FP8.
    """
    from flashinfer import BatchMLAPagedAttentionWrapper, append_paged_mla_kv_cache, mla  # noqa: PLC0415 - as above

    step, tables = rig.step, _Tables.of(rig)
    pages, sizes, dtype = tables.whole(), [step.size_v, step.head_size - step.size_v], _dtype(rig)
    is_fp8 = rig.backend.agreement.kv_cache_dtype == "fp8_e4m3"
    cache = rig.cache if is_fp8 else rig.direct_cache()
    latents, key, slots = cache.k, rig.key, rig.slots  # type: ignore[union-attr] # latents are paged
    parts, halves, new = (torch.split(each, sizes, -1) for each in (rig.query, latents.squeeze(2), key.squeeze(1)))
    unit = torch.ones(1, device=key.device)
    indices, output = _append_indices(rig, tables), rig.query.new_empty(*rig.query.shape[:2], step.size_v)
    wrapper = BatchMLAPagedAttentionWrapper(_workspace(rig), backend=rig.backend.variant)
    values = {
        "num_heads": step.num_q_heads,
        "head_dim_ckv": sizes[0],
        "head_dim_kpe": sizes[1],
        "page_size": rig.block_size,
        "causal": max(step.query_lens) > 1,
        "sm_scale": step.scale,
        "q_data_type": dtype,
        "kv_data_type": latents.dtype,
    }
    arrays = (_starts(step.query_lens), pages.indptr, pages.indices, tables.seq_lens)
    structural = getattr(mla, "MLAPlanMetadata", None)  # from 0.7 on
    if structural is None:
        wrapper.plan(*arrays, **values)
    else:
        modes = {"scale_mode": "kv-per-tensor"} if is_fp8 else {}
        wrapper.plan(metadata=structural.csr(*arrays), query_layout="split", kv_cache_layout="split", **modes, **values)
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if is_fp8 else {}

    def call() -> Tensor:
        if is_fp8:
            write_pages(key, latents, slots, unit, padded=False)
        else:
            append_paged_mla_kv_cache(*new, *indices[:2], *halves, *indices[2:])
        if structural is None:
            wrapper.run(*parts, *halves, out=output)
        else:
            wrapper.run(query=parts, kv_cache=halves, out=output, **scales)
        return output.flatten(1)

    return call


def _dense_calls(rig: Rig) -> Callable[[], Tensor]:
    """Return the wrapper's run over contiguous K/V."""
    from flashinfer import BatchPrefillWithRaggedKVCacheWrapper  # noqa: PLC0415 - as above

    step, query, key, value = rig.step, rig.query, rig.key, rig.value
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(_workspace(rig), _LAYOUT, backend=rig.backend.variant)
    values = {name: given for name, given in _shared_keywords(rig).items() if name != "page_size"}
    sizes = {"head_dim_qk": step.head_size, "head_dim_vo": step.size_v}
    wrapper.plan(_starts(step.query_lens), _starts(step.seq_lens), causal=True, **sizes, **values)
    output = query.new_empty(*query.shape[:2], step.size_v)

    def call() -> Tensor:
        wrapper.run(query, key, value, out=output)
        return output.flatten(1)

    return call


def _workspace(planner: Planner) -> Tensor:
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=planner.backend.device)


def _starts(lens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32)


def _append_indices(rig: Rig, tables: _Tables) -> tuple[Tensor, ...]:
    """Return the index arguments of an append, on the device: requests and positions of the rows, page arrays."""
    from flashinfer import get_batch_indices_positions  # noqa: PLC0415 - as above

    pages, step, device = tables.whole(), rig.step, tables.device
    starts = _starts(step.query_lens).to(device)
    rows = get_batch_indices_positions(starts, tables.seq_lens.to(device), step.num_tokens)
    return (*rows, pages.indices, pages.indptr.to(device), pages.last_page_len.to(device))


def _to_device(numbers: Tensor, device: torch.device) -> Tensor:
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def _dtype(planner: Planner) -> torch.dtype:
    found: torch.dtype = getattr(torch, planner.backend.agreement.requirements.dtype)
    return found
