"""Several query rows per request, with a paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer.csr import Lengths, check_offsets, check_pages, key_lengths
from flashinfer.journal import journal, recorded
from flashinfer.kernels import check_backend, check_dtypes, check_heads, dtype_of, resolve
from flashinfer.misuse import require, require_unused
from flashinfer.modules import compile_for
from flashinfer.operands import check_query, lse_for, output_for, pages_of
from flashinfer.rows import Rows
from flashinfer.wrapper import PagedWrapper, Planned, params_of, scale_output

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from flashinfer.exact import ScoreParams


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Prefills with a paged KV cache. `run` ignores `sinks`; plans are not causal by default."""

    @recorded
    def __init__(  # noqa: PLR0917 - the library's signature
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        require_unused(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        if jit_args is not None:
            journal.compile(*jit_args[:7], backend, jit_kwargs)
        check_backend(backend, "auto", "fa2", "fa3")
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph=use_cuda_graph)
        self._backend = backend
        self._rows = Rows()
        if use_cuda_graph:
            self._rows.buffer = self._buffer("qo_indptr_buf", qo_indptr_buf)
            batch_size = len(self._rows.buffer) - 1
            self._indptr = self._buffer("paged_kv_indptr_buf", paged_kv_indptr_buf, batch_size + 1)
            self._indices = self._buffer("paged_kv_indices_buf", paged_kv_indices_buf)
            self._last_page_len = self._buffer("paged_kv_last_page_len_buf", paged_kv_last_page_len_buf, batch_size)

    @recorded
    def plan(  # noqa: PLR0917 - the library's signature
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        require(pos_encoding_mode == "NONE", f"pos_encoding_mode={pos_encoding_mode!r} is not modelled")
        require_unused(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, rope_scale=rope_scale)
        require_unused(use_fp16_qk_reduction=use_fp16_qk_reduction, rope_theta=rope_theta, seq_lens=seq_lens)
        require_unused(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr)
        require_unused(token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr)
        require_unused(seq_lens_q=seq_lens_q, block_tables=block_tables, max_sequence_kv=max_sequence_kv)
        q = dtype_of(q_data_type)
        kv = dtype_of(q if kv_data_type is None else kv_data_type)
        o = dtype_of(q if o_data_type is None else o_data_type)
        backend = resolve(self._backend, kv)
        check_heads(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk)
        check_dtypes(backend, q, kv, o)
        check_offsets("qo_indptr", qo_indptr, len(paged_kv_last_page_len))
        check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, self.device)
        lens = tuple(qo_indptr.diff().tolist())
        longest = max(lens) if max_token_per_sequence is None else max_token_per_sequence
        require(longest == max(lens), f"max_token_per_sequence={longest} of queries of {lens}")
        require(causal or window_left < 0 or max(lens) <= 1, "a window without causal=True has no right bound")
        lengths = Lengths(lens, key_lengths(paged_kv_indptr, paged_kv_last_page_len, page_size))
        params = params_of(sm_scale, head_dim_qk, logits_soft_cap, window_left, causal=causal)
        planned = Planned(lengths, num_qo_heads, num_kv_heads, head_dim_qk, page_size, q, kv, o, params, backend)
        self._check_kernel(planned)
        if self._use_cuda_graph:
            self._fixed(len(qo_indptr) - 1, len(self._indptr) - 1)
        self._rows.take(qo_indptr, is_fixed=self._use_cuda_graph)
        journal.stage(self.number)
        self._take_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._load(planned)
        self._planned = planned

    @recorded
    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | Tensor | None = None,
        k_scale: float | Tensor | None = None,
        v_scale: float | Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        require_unused(skip=skip_softmax_threshold_scale_factor, kv_cache_sf=kv_cache_sf)
        planned = self._plan_of()
        require(window_left in (None, planned.params.window_left), "window_left differs from the plan's")
        check_query(q, planned.row_shape(self._rows.of_run(q, is_fixed=self._use_cuda_graph)), planned.q, self.device)
        shape = (planned.page_size, planned.num_kv_heads, planned.head_size)
        pages = pages_of(paged_kv_cache, self._kv_layout, shape, planned.kv, self.device)
        out = output_for(q, out, planned.o, like_empty=False)
        lse = lse_for(q, lse, return_lse=return_lse)
        params, sink = self._params(planned.scaled(q_scale, k_scale), args)  # type: ignore[arg-type]
        self._attend(self._rows.buffer, q, pages, out, lse, params, sink)
        scale_output(out, v_scale)  # type: ignore[arg-type]
        return out if lse is None else (out, lse)

    def _load(self, planned: Planned) -> None:
        """Load the module of a plan."""
        compile_for(planned)

    def _check_kernel(self, planned: Planned) -> None:
        """Refuse a plan that the wrapper's kernel does not support; here each plan loads its kernel."""

    def _params(self, params: ScoreParams, args: tuple[Any, ...]) -> tuple[ScoreParams, Tensor | None]:
        """Return the parameters of the scores, and the sinks: None in this wrapper."""
        require(not args, "arguments of custom kernels are not modelled")
        return params, None
