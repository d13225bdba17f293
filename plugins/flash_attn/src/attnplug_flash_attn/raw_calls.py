"""One call of each kernel library, its arguments ready: what is left at each layer is the call itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@frozen(eq=False, kw_only=True)
class Rows:
    """
    The decodes of a step, or its prompts. Tensors are int32, on the device.

    Attributes:
        where: Their rows of the step.
        past: Whether some of their keys are in the cache before the step.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_size: Size of a head.
        block_size: Slots per block.
        dtype: Of queries, keys and values.
        max_query: The most new tokens of a request.
        max_keys: The most keys of a request.
        query_starts: ``(requests + 1,)`` first rows.
        keys: ``(requests,)`` keys, new ones included.
        key_starts: ``(requests + 1,)`` first keys, packed.
        table: ``(requests, columns)`` blocks.
        slots: ``(keys of all,)`` slots.
    """

    where: slice
    past: bool
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    max_query: int
    max_keys: int
    query_starts: Tensor
    keys: Tensor
    key_starts: Tensor
    table: Tensor
    slots: Tensor

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return float(self.head_size**-0.5)


class Calls(ABC):
    """
    A library's calls.

    Attributes:
        fills_output: Whether results are put where they belong; otherwise they are new tensors.
        schedules: Whether work may be divided ahead of the calls.
    """

    fills_output: ClassVar[bool] = False
    schedules: ClassVar[bool] = False

    def schedule(self, rows: Rows) -> Tensor | None:
        """Return the schedule of a call, None where there is none."""
        del rows
        return None

    @abstractmethod
    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Rows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """
        Return the call.

        Args:
            query: ``(tokens, num_q_heads, head_size)``.
            key: ``(num_blocks, block_size, num_kv_heads, head_size)``; where there is no past, ``(tokens, num_kv_heads,
                head_size)``.
            value: Likewise.
            out: As `query`.
            rows: Whose rows these are.
            schedule: As `schedule` has returned it.
        """


class Fa2(Calls):
    """`flash_attn`: its call for packed rows, which splits the keys of decodes."""

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Rows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the call."""
        del out, schedule
        import flash_attn  # noqa: PLC0415 - a GPU's library

        lengths = (rows.query_starts, rows.key_starts, rows.max_query, rows.max_keys)
        given = {"block_table": rows.table if rows.past else None, "softmax_scale": rows.scale, "causal": True}
        return partial(flash_attn.flash_attn_varlen_func, query, key, value, *lengths, **given)


class Fa2Vllm(Calls):
    """The op `varlen_fwd`."""

    fills_output = True

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Rows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the op with its arguments in the order of its schema."""
        del schedule
        keys = (rows.keys, None, rows.table) if rows.past else (None, None, None)
        where = (rows.query_starts, rows.key_starts, *keys, None)
        how = (rows.max_query, rows.max_keys, 0.0, rows.scale, False, True, -1, -1, 0.0, False, 0, None)
        return partial(torch.ops._vllm_fa2_C.varlen_fwd.default, query, key, value, out, *where, *how)  # noqa: SLF001 - the op's name


class Fa3(Calls):
    """`flash_attn_interface`: its call for caches, which takes several rows per request as well, or that without."""

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Rows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the call."""
        del out, schedule
        import flash_attn_interface  # noqa: PLC0415 - a GPU's library

        if not rows.past:
            lengths = (rows.query_starts, rows.key_starts, rows.max_query, rows.max_keys)
            given: dict[str, Any] = {"softmax_scale": rows.scale, "causal": True}
            return partial(flash_attn_interface.flash_attn_varlen_func, query, key, value, *lengths, **given)
        return partial(
            flash_attn_interface.flash_attn_with_kvcache,
            query,
            key,
            value,
            cache_seqlens=rows.keys,
            page_table=rows.table,
            cu_seqlens_q=rows.query_starts,
            max_seqlen_q=rows.max_query,
            softmax_scale=rows.scale,
            causal=True,
        )


class Fa3Vllm(Calls):
    """The ops `fwd` and `get_scheduler_metadata`."""

    fills_output = True
    schedules = True

    def schedule(self, rows: Rows) -> Tensor | None:
        """Divide the work of what is read from pages."""
        if not rows.past:
            return None
        sizes = (rows.num_q_heads, rows.num_kv_heads, rows.head_size, rows.head_size, rows.dtype)
        lengths = (rows.keys, rows.query_starts, None, None, None, None, rows.block_size, 0)
        schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata.default  # noqa: SLF001 - the op's name
        how = (True, -1, -1, False, 0, None, 0)
        found: Tensor = schedule(len(rows.keys), rows.max_query, rows.max_keys, *sizes, *lengths, *how)
        return found

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Rows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the op with its arguments in the order of its schema."""
        none = (None,) * 3
        starts, keys, table = (None, rows.keys, rows.table) if rows.past else (rows.key_starts, None, None)
        lengths = (rows.query_starts, starts, None, None, keys, rows.max_query, rows.max_keys, table)
        how = (rows.scale, True, -1, -1, 0.0, True, schedule, 0, None, 0, None, 1, 0, None)
        fwd = torch.ops._vllm_fa3_C.fwd.default  # noqa: SLF001 - the op's name
        # key_new, value_new, query_value; batch indices, padding, rotary embedding (3); descales
        return partial(fwd, query, key, value, *none, out, *lengths, None, None, *none, *none, *how)


class Fa4(Calls):
    """`flash_attn.cute`: the function behind its public one, as engines call it. That one allocates what it returns."""

    fills_output = True

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Rows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the call."""
        del schedule
        from flash_attn.cute.interface import _flash_attn_fwd  # noqa: PLC0415 - a GPU's library, and seconds

        given: dict[str, Any] = {
            "cu_seqlens_q": rows.query_starts,
            **({"seqused_k": rows.keys, "page_table": rows.table} if rows.past else {"cu_seqlens_k": rows.key_starts}),
            "max_seqlen_q": rows.max_query,
            "max_seqlen_k": rows.max_keys,
            "softmax_scale": rows.scale,
            "causal": True,
            "out": out,
        }
        return partial(_flash_attn_fwd, query, key, value, **given)


class Torch(Calls):
    """torch's own op: keys that are in pages are packed into memory that is used again."""

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: Rows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the op, and what packs its keys."""
        del out, schedule
        lengths = (rows.query_starts, rows.key_starts, rows.max_query, rows.max_keys)
        how = {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False, "scale": rows.scale}
        attend: Any = partial(torch.ops.aten._flash_attention_forward.default, query)  # noqa: SLF001 - the op's name
        if not rows.past:
            return lambda: attend(key, value, *lengths, **how)[0]
        pages = tuple(cache.flatten(0, 1) for cache in (key, value))
        packed = tuple(cache.new_empty(len(rows.slots), *cache.shape[1:]) for cache in pages)

        def call() -> Any:
            for cache, into in zip(pages, packed, strict=True):
                torch.index_select(cache, 0, rows.slots, out=into)
            return attend(*packed, *lengths, **how)[0]

        return call


CALLS: Final[Mapping[str, Calls]] = MappingProxyType(
    {"fa2": Fa2(), "fa2_vllm": Fa2Vllm(), "fa3": Fa3(), "fa3_vllm": Fa3Vllm(), "fa4": Fa4(), "torch": Torch()}
)
"""By variant."""
