"""The wrapper for attention sinks: no soft cap, no scales, and a kernel that the constructor compiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from flashinfer.journal import recorded
from flashinfer.kernels import check_backend, resolve
from flashinfer.misuse import require, require_unused
from flashinfer.modules import SAFE
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

if TYPE_CHECKING:
    from torch import Tensor

    from flashinfer.exact import ScoreParams
    from flashinfer.wrapper import Planned


class BatchAttentionWithAttentionSinkWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """
    Attention with sinks. `run` takes them and the softmax scale by position.

    The library ignores the scale, the soft cap and the k_scale of plans; the fake refuses the latter two.
    """

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
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        q_data_type: torch.dtype = torch.bfloat16,
        kv_data_type: torch.dtype = torch.bfloat16,
        head_dim_qk: int = 128,
        head_dim_vo: int = 128,
        window_left: int = -1,
    ) -> None:
        check_backend(backend, "fa2", "fa3", "auto")
        require(pos_encoding_mode == "NONE", f"pos_encoding_mode={pos_encoding_mode!r} is not modelled")
        require_unused(use_fp16_qk_reduction=use_fp16_qk_reduction)
        require(kv_data_type == q_data_type, f"a KV cache of {kv_data_type} has scales, which these kernels ignore")
        self._kernel = (q_data_type, kv_data_type, head_dim_qk, head_dim_vo, window_left >= 0)
        backend = resolve(backend, kv_data_type)
        name = f"batch_prefill_attention_sink_{SAFE[q_data_type]}_swa_{window_left >= 0}_{backend}"
        super().__init__(  # by keyword, as in the library, so that a class between the two may change them
            float_workspace_buffer=float_workspace_buffer,
            kv_layout=kv_layout,
            use_cuda_graph=use_cuda_graph,
            qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf,
            paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            backend=backend,
            jit_args=[name, q_data_type, kv_data_type, q_data_type, torch.int32, head_dim_qk, head_dim_vo, ["sink"]],
            jit_kwargs={"use_sliding_window": window_left >= 0},
        )

    def _load(self, planned: Planned) -> None:
        """Load nothing: the constructor has loaded the module."""

    def _check_kernel(self, planned: Planned) -> None:
        required = (planned.q, planned.kv, planned.head_size, planned.head_size, planned.params.window_left >= 0)
        require(required == self._kernel, f"the wrapper is compiled for {self._kernel}, and the plan is for {required}")
        require(not planned.params.soft_cap, "the sink kernels have no soft cap, and ignore one")

    def _params(self, params: ScoreParams, args: tuple[Any, ...]) -> tuple[ScoreParams, Tensor | None]:
        require(params == self._plan_of().params, "the sink kernels ignore q_scale and k_scale")
        require(len(args) == 2, f"run(q, cache, sink, sm_scale) got {len(args)} arguments after the KV cache")
        sink, scale = args
        require(isinstance(sink, torch.Tensor) and isinstance(scale, float), "sink is a tensor, and sm_scale a float")
        heads = self._plan_of().num_qo_heads
        require(sink.dtype == torch.float32, f"the sink is {sink.dtype}, and is read as float32")
        require(tuple(sink.shape) == (heads,), f"the sink has shape {tuple(sink.shape)}, and there are {heads} heads")
        require(sink.device == self.device and sink.is_contiguous(), "the sink is elsewhere or not contiguous")
        return evolve(params, scale=scale), sink
