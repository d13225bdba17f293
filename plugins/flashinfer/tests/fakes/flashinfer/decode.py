"""Decodes of one query row per request: decode kernels on CUDA cores, or prefill kernels on tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from flashinfer.csr import Lengths, check_pages, key_lengths
from flashinfer.journal import journal, recorded
from flashinfer.kernels import check_backend, check_dtypes, check_group, check_heads, dtype_of
from flashinfer.misuse import require, require_unused
from flashinfer.modules import compile_for
from flashinfer.operands import check_query, lse_for, output_for, pages_of
from flashinfer.wrapper import PagedWrapper, Planned, params_of, scale_output

if TYPE_CHECKING:
    from torch import Tensor


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """
    Decodes of one row each. `run` accepts `sinks`, and ignores it.

    It also accepts `q_len_per_req` rows per request, and then writes only as many rows as there are requests.
    """

    @recorded
    def __init__(  # noqa: PLR0917 - the library's signature
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        require_unused(jit_args=jit_args)
        check_backend(backend, "auto", "fa2")
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph=use_cuda_graph)
        self._use_tensor_cores = use_tensor_cores
        self._batch_size = 0
        if use_cuda_graph:
            self._last_page_len = self._buffer("paged_kv_last_page_len_buffer", paged_kv_last_page_len_buffer)
            self._batch_size = len(self._last_page_len)
            self._indptr = self._buffer("paged_kv_indptr_buffer", paged_kv_indptr_buffer, self._batch_size + 1)
            self._indices = self._buffer("paged_kv_indices_buffer", paged_kv_indices_buffer)

    @property
    def use_tensor_cores(self) -> bool:
        """Whether the prefill kernels run."""
        return self._use_tensor_cores

    @recorded
    def plan(  # noqa: PLR0917 - the library's signature
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        require(pos_encoding_mode == "NONE", f"pos_encoding_mode={pos_encoding_mode!r} is not modelled")
        require_unused(data_type=data_type, rope_scale=rope_scale, rope_theta=rope_theta)
        require_unused(block_tables=block_tables, seq_lens=seq_lens)
        if fixed_split_size is not None and not self._use_tensor_cores:
            raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
        q = dtype_of(q_data_type)
        kv = dtype_of(q if kv_data_type is None else kv_data_type)
        o = dtype_of(q if o_data_type is None else o_data_type)
        backend = "fa2" if self._use_tensor_cores else "cuda_cores"
        check_heads(num_qo_heads, num_kv_heads, head_dim, head_dim)
        check_dtypes(backend, q, kv, o)
        if not self._use_tensor_cores:
            check_group(num_qo_heads, num_kv_heads)
        check_pages(indptr, indices, last_page_len, page_size, self.device)
        if self._use_cuda_graph:
            self._fixed(len(last_page_len), self._batch_size)
        journal.stage(self.number)
        self._take_pages(indptr, indices, last_page_len)
        self._batch_size = len(last_page_len)
        lengths = Lengths((1,) * self._batch_size, key_lengths(indptr, last_page_len, page_size))
        params = params_of(sm_scale, head_dim, logits_soft_cap, window_left, causal=False)
        self._planned = Planned(lengths, num_qo_heads, num_kv_heads, head_dim, page_size, q, kv, o, params, backend)
        compile_for(self._planned)

    @recorded
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        q_len_per_req: int | None = 1,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        require(not args, "arguments of custom kernels are not modelled")
        require_unused(skip=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf)
        planned = self._plan_of()
        require(window_left in (None, planned.params.window_left), "window_left differs from the plan's")
        rows = self._batch_size * (q_len_per_req or 1)
        check_query(q, planned.row_shape(rows), planned.q, self.device)
        shape = (planned.page_size, planned.num_kv_heads, planned.head_size)
        pages = pages_of(paged_kv_cache, self._kv_layout, shape, planned.kv, self.device)
        out = output_for(q, out, planned.o)
        lse = lse_for(q, lse, return_lse=return_lse)
        rows_of = torch.arange(self._batch_size + 1)
        self._attend(rows_of, q, pages, out, lse, planned.scaled(q_scale, k_scale))
        scale_output(out, v_scale)
        return out if lse is None else (out, lse)


@recorded
def fast_decode_plan(  # noqa: PLR0917 - the library's signature
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Tensor,
    indices: Tensor,
    last_page_len: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: Tensor | None = None,
) -> None:
    """
    Plan the decodes of a graph again, for the same kernel. The caller has already written the buffers.

    Outside a graph the library reads the device arrays in place; the fake does not model that.
    """
    require(self.is_cuda_graph_enabled, "a fast plan outside a graph is not modelled")
    require(global_override_indptr_cpu is not None, "without global_override_indptr_cpu a plan synchronizes")
    require_unused(data_type=data_type, rope_scale=rope_scale, rope_theta=rope_theta)
    former = self._plan_of()
    self._fixed(len(last_page_len), self._batch_size)
    if len(indices) > len(self._indices):
        raise ValueError("The size of indices should be less than or equal to the allocated buffer")
    host: Tensor = global_override_indptr_cpu  # type: ignore[assignment]
    check_pages(host, indices, last_page_len, page_size, self.device)
    q = dtype_of("float16" if q_data_type is None else q_data_type)
    kv = dtype_of(q if kv_data_type is None else kv_data_type)
    params = params_of(sm_scale, head_dim, logits_soft_cap, window_left, causal=False)
    one_each = self.use_tensor_cores and page_size == 1  # also for requests without pages
    last = torch.ones_like(last_page_len) if one_each else last_page_len
    lengths = Lengths((1,) * len(last_page_len), key_lengths(host, last, page_size))
    planned = Planned(lengths, num_qo_heads, num_kv_heads, head_dim, page_size, q, kv, former.o, params, former.backend)
    require(pos_encoding_mode == "NONE", f"pos_encoding_mode={pos_encoding_mode!r} is not modelled")
    require(planned.kernel == former.kernel, f"the kernel is for {former.kernel}, and the plan for {planned.kernel}")
    journal.stage(self.number)
    self._planned = planned
