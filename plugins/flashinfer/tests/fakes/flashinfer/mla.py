"""Absorbed attention over latents, with flat arguments as before 0.7."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from flashinfer.csr import Lengths, check_lengths, check_offsets
from flashinfer.journal import journal, recorded
from flashinfer.kernels import check_backend, check_latents, check_latents_in_fp8
from flashinfer.misuse import require, require_unused
from flashinfer.modules import SAFE
from flashinfer.operands import check_rows, lse_for, output_for
from flashinfer.wrapper import ScoreParams, Wrapper, write

if TYPE_CHECKING:
    from torch import Tensor

_WORKS = 16384


@frozen(eq=False)
class PlannedLatents:
    """
    The values of the last plan. The kernel reads the lengths from it, and only the pages from the arrays.

    Attributes:
        lengths: Rows and keys per request.
        starts: The first page of each request.
        heads: The number of query heads.
        sizes: The elements of a latent, and its rotary ones.
        page_size: Keys per page.
        dtype: The dtype of queries and outputs.
        cache: The dtype of latents.
        params: The parameters of the scores.
    """

    lengths: Lengths
    starts: tuple[int, ...]
    heads: int
    sizes: tuple[int, int]
    page_size: int
    dtype: torch.dtype
    cache: torch.dtype
    params: ScoreParams


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Attends to one latent per token, whose first part is the value too. LSE has base 2."""

    _latents: PlannedLatents | None = None
    _scale_mode = "default"
    _scales: tuple[float, float] | None = None
    _module_format = ""

    @recorded
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        check_backend(backend, "fa2", "fa3")
        self._begin(float_workspace_buffer, "NHD", use_cuda_graph=use_cuda_graph)
        self._backend = backend
        if use_cuda_graph:
            self._lens = self._buffer("kv_len_arr", kv_len_arr)
            self._rows = self._buffer("qo_indptr", qo_indptr, len(self._lens) + 1)
            self._starts = self._buffer("kv_indptr", kv_indptr, len(self._lens) + 1)
            self._indices = self._buffer("kv_indices", kv_indices)

    @recorded
    def plan(  # noqa: PLR0917 - the library's signature
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        require_unused(use_profiler=use_profiler)
        check_latents(self._backend, head_dim_ckv, head_dim_kpe)
        sizes = (head_dim_ckv, head_dim_kpe)
        check_latents_in_fp8(self._backend, q_data_type, kv_data_type, sizes, self._scale_mode)
        check_offsets("qo_indptr", qo_indptr, len(kv_len_arr))
        check_lengths(kv_indptr, kv_indices, kv_len_arr, page_size, self.device)
        lengths = Lengths(tuple(qo_indptr.diff().tolist()), tuple(kv_len_arr.tolist()))
        _check_tiles(lengths, num_heads, causal=causal)
        journal.stage(self.number)
        if self._use_cuda_graph:
            self._fixed(len(kv_len_arr), len(self._lens))
            for buffer, array in ((self._rows, qo_indptr), (self._starts, kv_indptr), (self._lens, kv_len_arr)):
                buffer.copy_(array)
            self._indices[: len(kv_indices)].copy_(kv_indices)
        else:
            self._indices = kv_indices
        params = ScoreParams(sm_scale, 0.0, -1, causal)
        starts, dtypes = tuple(kv_indptr.tolist()), (q_data_type, kv_data_type)
        self._latents = PlannedLatents(lengths, starts, num_heads, sizes, page_size, *dtypes, params)
        dtype, cache = (SAFE[one] for one in dtypes)
        form = f"dtype_q_{dtype}_dtype_kv_{cache}_dtype_o_{dtype}_dtype_idx_i32_head_dim_ckv_{sizes[0]}"
        ending = self._module_format + "_sm90" * (self._backend == "fa3")
        journal.compile(f"batch_mla_attention_{form}_head_dim_kpe_{sizes[1]}_profiler_False{ending}", *dtypes, sizes)

    @recorded
    def run(  # noqa: PLR0917 - the library's signature
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        ckv_cache: Tensor,
        kpe_cache: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        require_unused(profiler_buffer=profiler_buffer, kv_len=kv_len, page_table=page_table, o_scale=o_scale)
        require_unused(return_lse_base_on_e=return_lse_base_on_e)
        planned = self._latents
        assert planned is not None, "called before plan()"
        rows = sum(planned.lengths.rows)
        for size, query, pages in zip(planned.sizes, (q_nope, q_pe), (ckv_cache, kpe_cache), strict=True):
            dtypes = (query.dtype, pages.dtype)
            require(dtypes == (planned.dtype, planned.cache), f"{dtypes}, and {planned.dtype, planned.cache}")
            check_rows("the query", query, (rows, planned.heads, size), self.device)
            check_rows("the cache", pages, (ckv_cache.shape[0], planned.page_size, size), self.device)
        out = output_for(q_nope, out, planned.dtype)
        lse = lse_for(q_nope, lse, return_lse=return_lse)
        query, pages, first = torch.cat((q_nope, q_pe), -1), self._dequantized(ckv_cache, kpe_cache), 0
        for request, (count, keys) in enumerate(zip(planned.lengths.rows, planned.lengths.keys, strict=True)):
            mine, first = slice(first, first + count), first + count
            if count:
                key = pages[self._pages_of(request)].flatten(0, 1)[:keys, None]
                value = key[..., : planned.sizes[0]]
                write(query[mine], key, value, planned.params, out[mine], lse if lse is None else lse[mine])
        return out if lse is None else (out, lse)

    def _dequantized(self, *halves: Tensor) -> Tensor:
        """Return latents in the dtype of queries. As in the kernels, scales are rounded to it, and products too."""
        planned = self._latents
        assert planned is not None
        if planned.cache == planned.dtype:
            return torch.cat(halves, -1)
        require(self._scales is not None, "FP8 latents without ckv_scale and kpe_scale")
        scales = torch.tensor(self._scales, dtype=planned.dtype)
        return torch.cat([half.to(planned.dtype) * scale for half, scale in zip(halves, scales, strict=True)], -1)

    def _pages_of(self, request: int) -> Tensor:
        planned = self._latents
        assert planned is not None
        return self._indices[planned.starts[request] : planned.starts[request + 1]].long()


def _check_tiles(lengths: Lengths, heads: int, *, causal: bool) -> None:
    """
    Check the tiles of query rows times heads: 64, or 128 where requests have more than 64 on average.

    Raises:
        MisuseError: There are more than the library's lists have memory for, or one ends between the heads of a row: a
            causal kernel then bounds keys by the row before, and may hide the row's last key.
    """
    tile = 128 if sum(lengths.rows) * heads // len(lengths.rows) > 64 else 64
    tiles = sum(-(-rows * heads // tile) for rows in lengths.rows)
    require(tiles + 256 <= _WORKS, f"{tiles} tiles are written into lists of {_WORKS}")
    divided = [rows for rows in lengths.rows if rows * heads > tile and tile % heads]
    require(not (causal and divided), f"tiles of {tile} end between the {heads} heads of a row")
