"""Prefills with contiguous (non-paged) K/V, one request after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer.csr import Lengths, check_offsets
from flashinfer.journal import journal, recorded
from flashinfer.kernels import check_backend, check_dtypes, check_heads, dtype_of, resolve
from flashinfer.misuse import require, require_unused
from flashinfer.modules import compile_for
from flashinfer.operands import check_query, check_rows, lse_for, output_for
from flashinfer.rows import Rows
from flashinfer.wrapper import Planned, Wrapper, params_of, write

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Prefills with ragged K/V. `run` ignores scales; the fake models no graph mode."""

    @recorded
    def __init__(  # noqa: PLR0917 - the library's signature
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        kv_indptr_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        require_unused(use_cuda_graph=use_cuda_graph, qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
        require_unused(custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        require_unused(jit_args=jit_args, jit_kwargs=jit_kwargs)
        check_backend(backend, "auto", "fa2", "fa3")
        require(kv_layout == "NHD", "ragged K/V with heads first are not modelled")
        self._begin(float_workspace_buffer, kv_layout, use_cuda_graph=False)
        self._backend = backend
        self._rows, self._keys = Rows(), Rows()

    @recorded
    def plan(  # noqa: PLR0917 - the library's signature
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Tensor | None = None,
        o_indptr: Tensor | None = None,
    ) -> None:
        require(pos_encoding_mode == "NONE", f"pos_encoding_mode={pos_encoding_mode!r} is not modelled")
        require_unused(custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, rope_scale=rope_scale)
        require_unused(use_fp16_qk_reduction=use_fp16_qk_reduction, rope_theta=rope_theta, seq_lens=seq_lens)
        require_unused(prefix_len_ptr=prefix_len_ptr, token_pos_in_items_ptr=token_pos_in_items_ptr)
        require_unused(token_pos_in_items_len=token_pos_in_items_len, max_item_len_ptr=max_item_len_ptr)
        require_unused(seq_lens_q=seq_lens_q, max_token_per_sequence=max_token_per_sequence)
        require_unused(max_sequence_kv=max_sequence_kv, v_indptr=v_indptr, o_indptr=o_indptr)
        q = dtype_of(q_data_type)
        kv = dtype_of(q if kv_data_type is None else kv_data_type)
        o = dtype_of(q if o_data_type is None else o_data_type)
        require(kv == q, f"ragged K/V of {kv} with queries of {q} are not modelled")
        backend = resolve(self._backend, kv)
        size_v = head_dim_vo or head_dim_qk
        check_heads(num_qo_heads, num_kv_heads, head_dim_qk, size_v, (192, 128))
        check_dtypes(backend, q, kv, o)
        batch_size = len(qo_indptr) - 1
        if len(kv_indptr) != batch_size + 1:
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        require(batch_size > 0, "a plan without requests")
        check_offsets("qo_indptr", qo_indptr, batch_size)
        check_offsets("kv_indptr", kv_indptr, batch_size)
        lengths = Lengths(tuple(qo_indptr.diff().tolist()), tuple(kv_indptr.diff().tolist()))
        require(causal or window_left < 0, "a window without causal=True has no right bound")
        journal.stage(self.number)
        self._rows.take(qo_indptr, is_fixed=False)
        self._keys.buffer = kv_indptr.clone()
        params = params_of(sm_scale, head_dim_qk, logits_soft_cap, window_left, causal=causal)
        self._planned = Planned(lengths, num_qo_heads, num_kv_heads, head_dim_qk, 1, q, kv, o, params, backend, size_v)
        compile_for(self._planned)

    @recorded
    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        kv_cache_sf: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        require(not args, "arguments of custom kernels are not modelled")
        require_unused(kv_cache_sf=kv_cache_sf)
        planned = self._plan_of()
        rows, keys = self._rows.buffer, self._keys.buffer
        check_query(q, planned.row_shape(int(rows[-1])), planned.q, self.device)
        if k.dtype != planned.kv:
            raise ValueError(f"The dtype of k {k.dtype} does not match the kv_data_type {planned.kv}")
        require(v.dtype == k.dtype, f"values are {v.dtype}, and keys {k.dtype}")
        for name, tensor, size in (("k", k, planned.head_size), ("v", v, planned.head_size_v)):
            check_rows(name, tensor, (int(keys[-1]), planned.num_kv_heads, size), self.device)
        out = output_for(q, out, planned.o, size=planned.head_size_v)
        lse = lse_for(q, lse, return_lse=return_lse)
        for request in range(len(rows) - 1):
            mine = slice(int(rows[request]), int(rows[request + 1]))
            theirs = slice(int(keys[request]), int(keys[request + 1]))
            if mine.start < mine.stop:
                write(q[mine], k[theirs], v[theirs], planned.params, out[mine], lse if lse is None else lse[mine])
        return out if lse is None else (out, lse)
