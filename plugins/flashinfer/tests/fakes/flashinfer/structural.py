"""Absorbed attention over latents as from 0.7 on: a plan declares what its runs have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from flashinfer import mla
from flashinfer.journal import recorded
from flashinfer.misuse import require, require_unused

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@frozen(eq=False)
class MLAPlanMetadata:
    """The arrays of a plan."""

    qo_indptr: Tensor
    kv_indptr: Tensor
    kv_indices: Tensor
    kv_len_arr: Tensor

    @classmethod
    def csr(cls, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor) -> MLAPlanMetadata:
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLAPagedAttentionWrapper(mla.BatchMLAPagedAttentionWrapper):
    """Refuses the flat arguments, which the library deprecates, and runs that differ from their plan."""

    _module_format = "_planabi2"

    @recorded
    def plan(  # noqa: PLR0917 - the library's signature
        self,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        num_heads: int | None = None,
        head_dim_ckv: int | None = None,
        head_dim_kpe: int | None = None,
        page_size: int | None = None,
        causal: bool | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype | None = None,
        kv_data_type: torch.dtype | None = None,
        use_profiler: bool = False,
        *,
        metadata: MLAPlanMetadata | None = None,
        cum_seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_q_len: int | None = None,
        query_layout: str | None = None,
        kv_cache_layout: str | None = None,
        lse_mode: str = "none",
        output_dtype: torch.dtype | None = None,
        output_scale: str = "none",
        scale_mode: str = "default",
        skip_softmax: bool = False,
        enable_pdl: bool | None = None,
        use_sinks: bool = False,
    ) -> None:
        require_unused(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_indices=kv_indices, kv_len_arr=kv_len_arr)
        require_unused(cum_seq_lens_q=cum_seq_lens_q, block_tables=block_tables, seq_lens=seq_lens)
        require_unused(max_q_len=max_q_len, output_dtype=output_dtype, skip_softmax=skip_softmax, use_sinks=use_sinks)
        require_unused(enable_pdl=enable_pdl)
        require(metadata is not None, "a plan without metadata")
        require(output_scale == "none", "scales of outputs are not modelled")
        require((query_layout, kv_cache_layout) == ("split", "split"), "packed queries and latents are not modelled")
        self._lse_mode, self._scale_mode = lse_mode, scale_mode
        flat: dict[str, Any] = asdict(metadata, recurse=False)  # type: ignore[arg-type]
        super().plan(
            **flat,
            num_heads=num_heads,  # type: ignore[arg-type]
            head_dim_ckv=head_dim_ckv,  # type: ignore[arg-type]
            head_dim_kpe=head_dim_kpe,  # type: ignore[arg-type]
            page_size=page_size,  # type: ignore[arg-type]
            causal=causal,  # type: ignore[arg-type]
            sm_scale=sm_scale,  # type: ignore[arg-type]
            q_data_type=q_data_type,  # type: ignore[arg-type]
            kv_data_type=kv_data_type,  # type: ignore[arg-type]
            use_profiler=use_profiler,
        )

    @recorded
    def run(  # type: ignore[override]  # noqa: PLR0917 - the library's signature
        self,
        q_nope: Tensor | None = None,
        q_pe: Tensor | None = None,
        ckv_cache: Tensor | None = None,
        kpe_cache: Tensor | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: Tensor | None = None,
        kv_len: Tensor | None = None,
        page_table: Tensor | None = None,
        return_lse_base_on_e: bool = False,
        o_scale: float | None = None,
        *,
        query: object = None,
        kv_cache: object = None,
        ckv_scale: float | None = None,
        ckv_scale_arr: Tensor | None = None,
        kpe_scale: float | None = None,
        sinks: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        bmm1_scale: float | Tensor | None = None,
        bmm2_scale: float | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        require_unused(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache, bmm1_scale=bmm1_scale)
        require_unused(ckv_scale_arr=ckv_scale_arr, sinks=sinks)
        require_unused(skip=skip_softmax_threshold_scale_factor, bmm2_scale=bmm2_scale)
        require(type(query) is tuple and type(kv_cache) is tuple, "split queries and latents are tuples of two")
        scales, is_fp8 = (ckv_scale, kpe_scale), self._scale_mode == "kv-per-tensor"
        if any((type(scale) is float) is not is_fp8 for scale in scales):
            raise ValueError(f"the plan has scale mode {self._scale_mode!r}, and the run the scales {scales}")
        self._scales = scales if is_fp8 else None  # type: ignore[assignment]
        mode = "none" if lse is None and not return_lse else "basee" if return_lse_base_on_e else "base2"
        if mode != self._lse_mode:
            raise ValueError(f"the plan has LSE mode {self._lse_mode!r}, and the run {mode!r}")
        more = {"profiler_buffer": profiler_buffer, "kv_len": kv_len, "page_table": page_table, "o_scale": o_scale}
        return super().run(*query, *kv_cache, out=out, lse=lse, return_lse=return_lse, **more)  # type: ignore[misc, arg-type]
