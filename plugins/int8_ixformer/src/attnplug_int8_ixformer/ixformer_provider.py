"""
The vendor's kernels. Only this module names the library's calls; it is imported once the variant is chosen.

The library is not publicly installable: what its calls take was read from what its users call.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

import torch
from attrs import frozen
from torch import Tensor

from attnplug.errors import PluginLoadError
from attnplug_int8_ixformer.probe import IXFORMER_MODULES
from attnplug_int8_ixformer.provider import Provider

if TYPE_CHECKING:
    from attnplug.contract import GraphBuffers, MetadataBuilder, Phase
    from attnplug_int8_ixformer.backend import Int8Backend
    from attnplug_int8_ixformer.pages import Pages
    from attnplug_int8_ixformer.terms import Terms

_CALLS: Final = (
    (
        "scaled_int8_quant_for_attn", "reshape_and_cache_flash_int8", "reshape_and_cache_flash_mix",
        "vllm_paged_attention_int8", "vllm_paged_attention_mix", "merge_attn_states",
    ),
    ("flash_attn_varlen_int8_func",),
)  # fmt: skip
"""What is called of each module."""

_PER_ROW: Final = 2
"""Mode of its quantization: a scale per token and head."""

_PER_CHANNEL: Final = 0
"""Mode of its quantization: a scale per head and channel, here always given."""


@frozen(eq=False, kw_only=True)
class Decodes:
    """
    The decodes of a step.

    Attributes:
        query_starts: ``(num_reqs + 1,)`` int32.
        context_lens: ``(num_reqs,)`` int32, 1 where a request has no query: the library writes a key for padding too.
        table: ``(num_reqs, max_blocks)`` int32, the null block where a request has no query.
        longest_query: New tokens of a request, at most.
        longest_seq: Keys of a request, at most.
        in_graph: Whether the call is captured.
        mixed: Whether the batch has prefills too: its rows are written apart then.
    """

    query_starts: Tensor
    context_lens: Tensor
    table: Tensor
    longest_query: int
    longest_seq: int
    in_graph: bool
    mixed: bool


@frozen(eq=False, kw_only=True)
class Prefills:
    """
    The prefills of a step.

    Attributes:
        query_starts: ``(num_reqs + 1,)`` int32.
        key_starts: ``(num_reqs + 1,)`` int32.
        table: ``(num_reqs, max_blocks)`` int32.
        longest_query: New tokens of a request, at most.
        longest_seq: Keys of a request, at most.
    """

    query_starts: Tensor
    key_starts: Tensor
    table: Tensor
    longest_query: int
    longest_seq: int


class IxformerProvider(Provider):
    """Calls ixformer."""

    fuses_in_mixed = False

    def __init__(self, backend: Int8Backend) -> None:
        super().__init__(backend)
        self._functions, self._attention = (
            _module_with(name, calls) for name, calls in zip(IXFORMER_MODULES, _CALLS, strict=True)
        )

    def plan_decodes(
        self, decodes: Phase, builder: MetadataBuilder, graph: GraphBuffers | None, *, mixed: bool
    ) -> Decodes:
        """Give padding the null block, whatever its row of the table still names, and keep that where graphs read."""
        is_padding, table = decodes.query_start_loc.diff() == 0, cast("Tensor", decodes.block_table)
        return Decodes(
            query_starts=decodes.query_start_loc.contiguous(),
            context_lens=builder.persist(graph, "context_lens", decodes.seq_lens.masked_fill(is_padding, 1)),
            table=builder.persist(graph, "table", table.masked_fill(is_padding[:, None], 0)),
            longest_query=decodes.max_query_len,
            longest_seq=decodes.max_seq_len,
            in_graph=graph is not None,
            mixed=mixed,
        )

    def plan_prefills(self, prefills: Phase, builder: MetadataBuilder) -> Prefills:
        """Number the keys."""
        del builder
        lens = prefills.seq_lens
        return Prefills(
            query_starts=prefills.query_start_loc.contiguous(),
            key_starts=torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
            table=cast("Tensor", prefills.block_table),
            longest_query=prefills.max_query_len,
            longest_seq=prefills.max_seq_len,
        )

    def write(self, key: Tensor, value: Tensor, pages: Pages, slots: Tensor) -> None:
        """Quantize rows, and write them."""
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
        self, query: Tensor, new: tuple[Tensor, Tensor] | None, pages: Pages, out: Tensor, plan: Decodes, terms: Terms
    ) -> None:
        """Attend paged keys, and write the new ones where they are given."""
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
            scale=terms.scale,
            block_tables=plan.table,
            context_lens=plan.context_lens,
            block_size=pages.keys.shape[1],
            softcap=terms.soft_cap,
            alibi_slopes=terms.slopes,
            causal=True,
            window_left=terms.left,
            window_right=0 if terms.left >= 0 else -1,
            use_sqrt_alibi=terms.is_sqrt,
            use_cuda_graph=plan.in_graph,
            max_context_len=plan.longest_seq,
            cu_query_lens=plan.query_starts,
            max_query_len=plan.longest_query,
            **saved,
        )

    def prefill(self, query: Tensor, pages: Pages, out: Tensor, plan: Prefills, terms: Terms) -> None:
        """Attend paged keys, all of which are written."""
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
            max_seqlen_q=plan.longest_query,
            max_seqlen_k=plan.longest_seq,
            softmax_scale=terms.scale,
            causal=True,
            window_size=(terms.left, 0 if terms.left >= 0 else -1),
            alibi_slopes=terms.slopes,
            softcap=terms.soft_cap,
            sqrt_alibi=terms.is_sqrt,
            out=out,
            block_table=plan.table,
            output_dtype=out.dtype,
        )

    def merge(self, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], out: Tensor) -> None:
        """
        Merge two partial results, output and LSE each, into one output. Nothing that the manifest serves needs it: the
        int8 calls return no LSE.
        """
        self._functions.merge_attn_states(*first, *second, out)

    def _queries(self, query: Tensor, *, transposed: bool) -> tuple[Tensor, Tensor]:
        """Int8 rows and scales, ``(num_heads, tokens)`` where transposed, ``(tokens, num_heads)`` else."""
        rows, scales = self._functions.scaled_int8_quant_for_attn(query, _PER_ROW, transpose_scale=transposed)
        return rows, scales

    def _rows(self, key: Tensor, value: Tensor, pages: Pages) -> dict[str, Tensor]:
        """What is written of new rows, as the decode calls name it."""
        rows, scales = self._functions.scaled_int8_quant_for_attn(key, _PER_ROW, transpose_scale=False)
        if pages.value_scales is not None:
            value, _ = self._functions.scaled_int8_quant_for_attn(value, _PER_CHANNEL, scale=pages.value_scales)
        return {"save_key": rows, "save_value": value, "save_key_scale": scales}


def _module_with(name: str, calls: tuple[str, ...]) -> Any:
    module = import_module(name)
    lacking = [call for call in calls if not callable(getattr(module, call, None))]
    if lacking:
        raise PluginLoadError(
            f"{name} was imported for int8 attention",
            f"it has no {', '.join(lacking)}",
            "install a release of ixformer that has these calls",
        )
    return module


def _heads_first(pages: Tensor) -> Tensor:
    """``(num_blocks, num_kv_heads, block_size, head_size)``, as it lies in memory."""
    return pages.transpose(1, 2)
