"""
The vendor library ixformer. Only this module calls it; it is imported once the variant is chosen.

The library is not publicly available. The arguments of its functions were inferred from code that calls them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from attrs import frozen
from torch import Tensor

from attnplug.batching import num_unpadded_tokens
from attnplug.errors import PluginLoadError
from attnplug_int8_ixformer.plugin import IXFORMER_MODULES
from attnplug_int8_ixformer.provider import Provider, ScoreParams

if TYPE_CHECKING:
    from attnplug.contract import GraphBuffers, MetadataBuilder, Phase
    from attnplug_int8_ixformer.backend import Int8Backend
    from attnplug_int8_ixformer.pages import Pages

_CALLS: Final = (
    (
        "scaled_int8_quant_for_attn", "reshape_and_cache_flash_int8", "reshape_and_cache_flash_mix",
        "vllm_paged_attention_int8", "vllm_paged_attention_mix", "merge_attn_states",
    ),
    ("flash_attn_varlen_int8_func",),
)  # fmt: skip
"""The functions of each module that are called."""

_PER_ROW: Final = 2
"""Quantization mode: a scale per token and head."""

_PER_CHANNEL: Final = 0
"""Quantization mode: a static scale per head and channel."""


@frozen(eq=False, kw_only=True)
class DecodePlan:
    """
    The decodes of a step.

    Attributes:
        query_starts: ``(num_reqs + 1,)`` int32; padding has no query.
        padded_rows: ``(num_tokens,)`` bool in a graph: the rows of padding, which the library leaves as they are.
        context_lens: ``(num_reqs,)`` int32; 1 for padding, since the library writes a key for padding too.
        table: ``(num_reqs, max_blocks)`` int32; the null block for padding.
        max_query_len: The most new tokens of a request.
        max_seq_len: The most keys of a request.
        in_graph: Whether the call is captured.
        mixed: Whether the batch has prefills too. Its rows are then written by a separate call.
    """

    query_starts: Tensor
    padded_rows: Tensor | None
    context_lens: Tensor
    table: Tensor
    max_query_len: int
    max_seq_len: int
    in_graph: bool
    mixed: bool


@frozen(eq=False, kw_only=True)
class PrefillPlan:
    """
    The prefills of a step.

    Attributes:
        query_starts: ``(num_reqs + 1,)`` int32.
        key_starts: ``(num_reqs + 1,)`` int32.
        table: ``(num_reqs, max_blocks)`` int32.
        max_query_len: The most new tokens of a request.
        max_seq_len: The most keys of a request.
    """

    query_starts: Tensor
    key_starts: Tensor
    table: Tensor
    max_query_len: int
    max_seq_len: int


class IxformerProvider(Provider):
    """The provider of ixformer."""

    fuses_mixed_writes = False
    contiguous_blocks = True  # what the library makes of room between blocks is not known

    def __init__(self, backend: Int8Backend) -> None:
        super().__init__(backend)
        self._functions, self._attention = (
            _module_with(name, calls) for name, calls in zip(IXFORMER_MODULES, _CALLS, strict=True)
        )

    def plan_decodes(
        self, decodes: Phase, builder: MetadataBuilder, graph: GraphBuffers | None, *, mixed: bool
    ) -> DecodePlan:
        """Return the plan, with the null block for padding; graphs read these tensors again, so they persist."""
        starts, table, rows = decodes.query_start_loc.contiguous(), cast("Tensor", decodes.block_table), None
        if graph is not None:  # padding has rows there, and the library writes a row's key even where it has none
            used = num_unpadded_tokens(starts, decodes.seq_lens)
            tokens = torch.arange(decodes.num_tokens, dtype=torch.int32, device=starts.device)
            rows = builder.persist(graph, "padded_rows", tokens >= used)
            starts = builder.persist(graph, "query_starts", starts.minimum(used))
        is_padding = starts.diff() == 0
        return DecodePlan(
            query_starts=starts,
            padded_rows=rows,
            context_lens=builder.persist(graph, "context_lens", decodes.seq_lens.masked_fill(is_padding, 1)),
            table=builder.persist(graph, "table", table.masked_fill(is_padding[:, None], 0)),
            max_query_len=decodes.max_query_len,
            max_seq_len=decodes.max_seq_len,
            in_graph=graph is not None,
            mixed=mixed,
        )

    def plan_prefills(self, prefills: Phase, builder: MetadataBuilder) -> PrefillPlan:
        """Return the plan, with the cumulative key lengths."""
        del builder
        lens = prefills.seq_lens
        return PrefillPlan(
            query_starts=prefills.query_start_loc.contiguous(),
            key_starts=torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
            table=cast("Tensor", prefills.block_table),
            max_query_len=prefills.max_query_len,
            max_seq_len=prefills.max_seq_len,
        )

    def write(self, key: Tensor, value: Tensor, pages: Pages, slots: Tensor) -> None:
        """Quantize rows, and write them to the KV cache."""
        rows = self._rows(key, value, pages)
        call = "reshape_and_cache_flash_mix" if pages.value_scales is None else "reshape_and_cache_flash_int8"
        getattr(self._functions, call)(
            rows["save_key"],
            rows["save_value"],
            rows["save_key_scale"],
            _heads_first(pages.keys),
            _heads_first(pages.values),
            pages.key_scales,
            slots.contiguous(),
            kv_cache_dtype="",
        )

    def decode(
        self,
        query: Tensor,
        new: tuple[Tensor, Tensor] | None,
        pages: Pages,
        out: Tensor,
        plan: DecodePlan,
        params: ScoreParams,
    ) -> None:
        """Compute attention of decodes, and write their new rows if passed."""
        rows, scales = self._queries(query, transposed=plan.mixed)
        saved = {} if new is None else self._rows(*new, pages)
        attend, static = self._functions.vllm_paged_attention_mix, {}
        if pages.value_scales is not None:
            attend, static = self._functions.vllm_paged_attention_int8, {"value_scale_cache": pages.value_scales}
        attend(
            output=out,
            query=rows,
            key_cache=_heads_first(pages.keys),
            value_cache=_heads_first(pages.values),
            query_scale=scales.T.contiguous() if plan.mixed else scales,
            key_scale_cache=pages.key_scales,
            **static,
            num_kv_heads=pages.keys.shape[2],
            scale=params.scale,
            block_tables=plan.table,
            context_lens=plan.context_lens,
            block_size=pages.keys.shape[1],
            softcap=params.soft_cap,
            alibi_slopes=params.slopes,
            causal=True,
            window_left=params.left,
            window_right=0 if params.left >= 0 else -1,
            use_sqrt_alibi=params.is_sqrt,
            use_cuda_graph=plan.in_graph,
            max_context_len=plan.max_seq_len,
            cu_query_lens=plan.query_starts,
            max_query_len=plan.max_query_len,
            **saved,
        )
        if plan.padded_rows is not None:
            out.masked_fill_(plan.padded_rows.view(-1, 1, 1), 0)

    def prefill(self, query: Tensor, pages: Pages, out: Tensor, plan: PrefillPlan, params: ScoreParams) -> None:
        """Compute attention of prefills, whose keys are all written."""
        rows, scales = self._queries(query, transposed=True)
        self._attention.flash_attn_varlen_int8_func(
            q=rows,
            k=_heads_first(pages.keys),
            v=_heads_first(pages.values),
            q_scale=scales,
            k_scale=pages.key_scales,
            v_scale=pages.value_scales,
            cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=plan.key_starts,
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=plan.max_seq_len,
            softmax_scale=params.scale,
            causal=True,
            window_size=(params.left, 0 if params.left >= 0 else -1),
            alibi_slopes=params.slopes,
            softcap=params.soft_cap,
            sqrt_alibi=params.is_sqrt,
            out=out,
            block_table=plan.table,
            output_dtype=out.dtype,
        )

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], out: Tensor) -> None:
        """
        Merge two partial outputs by their LSEs into one.

        The manifest supports no feature that needs it: the int8 functions return no LSE.
        """
        self._functions.merge_attn_states(*first, *second, out)

    def _queries(self, query: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Return int8 rows and scales, ``(num_heads, tokens)`` if transposed, else ``(tokens, num_heads)``."""
        rows, scales = self._functions.scaled_int8_quant_for_attn(query, _PER_ROW, transpose_scale=transposed)
        return rows, scales

    def _rows(self, key: Tensor, value: Tensor, pages: Pages) -> dict[str, Tensor]:
        """Return the quantized new rows by the argument names of the decode functions."""
        rows, scales = self._functions.scaled_int8_quant_for_attn(key, _PER_ROW, transpose_scale=False)
        if pages.value_scales is not None:
            value, _ = self._functions.scaled_int8_quant_for_attn(value, _PER_CHANNEL, scale=pages.value_scales)
        return {"save_key": rows, "save_value": value, "save_key_scale": scales}


def _module_with(name: str, calls: tuple[str, ...]) -> Any:
    module = import_module(name)
    missing = [call for call in calls if not callable(getattr(module, call, None))]
    if missing:
        raise PluginLoadError(
            f"{name} has no {', '.join(missing)}",
            "",
            "install a release of ixformer that has these functions",
        )
    return module


def _heads_first(pages: Tensor) -> Tensor:
    """Return ``(num_blocks, num_kv_heads, block_size, head_size)``, the layout in memory."""
    return pages.transpose(1, 2)
