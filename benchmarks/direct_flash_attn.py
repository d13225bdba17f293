"""Direct calls of FlashAttention, as a host for one library writes them: the baseline of the plugin's benchmarks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug.ops import write_kv

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnplug_kit.bench import Planner, Rig


SCHEDULE: Final = "the direct `get_scheduler_metadata`"


@frozen
class DirectFlashAttention:
    """
    One call for decodes and one for prefills, of the variant's library.

    Prefills without cached keys read contiguous K/V, all others pages. `attnplug.ops.write_kv` writes the new K/V in
    one launch, since most of these libraries have no cache write, and attention is what is compared.
    """

    backend: ClassVar[str] = "flash_attn"
    what: ClassVar[str] = "direct FlashAttention calls"

    def layer(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the cache write and the calls of one step, with schedules if the library has them."""
        calls = CALLS[rig.backend.variant]
        query, key, value = rig.query, rig.key, rig.value
        pages = (key, value)
        if rig.cache is not None:
            cache = rig.direct_cache()
            pages = (cache.k, cache.v)
        if rig.step.latent:  # the library's keys are the rotary parts
            key, pages = key[..., rig.step.size_v :], (pages[0][..., rig.step.size_v :], pages[1])
        output = query.new_empty(*query.shape[:2], rig.step.size_v)
        runs = []
        for rows in _rows(rig):
            keys, values = pages if rows.has_cached else (key[rows.tokens], value[rows.tokens])
            runs.append(calls.bind(query[rows.tokens], keys, values, output[rows.tokens], rows, calls.schedule(rows)))

        def write() -> None:
            if rig.cache is not None:
                write_kv(key, value, *pages, slots, padded=False)

        slots = rig.slots
        return _in_turn(write, runs, output if calls.fills_output else None)

    def captured(self, rig: Rig) -> Callable[[], Tensor]:
        """Return the same calls: all that they read keeps its address."""
        return self.layer(rig)

    def plans(self, planner: Planner, *, captured: bool) -> Mapping[str, Callable[[], object]]:
        """Return the schedules of a step, from lengths on the device; nothing if the library has none."""
        del captured
        calls = CALLS[planner.backend.variant]
        parts = [rows for rows in _rows(planner) if rows.has_cached and calls.schedules]
        if not parts:
            return {}
        return {SCHEDULE: lambda: [calls.schedule(rows) for rows in parts]}


def _in_turn(
    write: Callable[[], None], runs: list[Callable[[], Tensor]], output: Tensor | None
) -> Callable[[], Tensor]:
    """Return a function that writes and runs. Without `output`, it concatenates the library's new tensors."""

    def call() -> Tensor:
        write()
        outputs = [run() for run in runs]
        if output is not None:
            return output.flatten(1)
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).flatten(1)

    return call


def _rows(planner: Planner) -> list[PhaseRows]:
    """Return the decodes and the prefills of a step, if it has any."""
    first = planner.step.query_lens.count(1)
    parts = (slice(0, first), slice(first, planner.step.num_reqs))
    return [_of(planner, part) for part in parts if planner.step.query_lens[part]]


def _of(planner: Planner, part: slice) -> PhaseRows:
    step, device = planner.step, planner.backend.device
    query_lens, seq_lens = step.query_lens[part], step.seq_lens[part]
    begin, count = sum(step.query_lens[: part.start]), sum(query_lens)
    tables = [torch.tensor(blocks, dtype=torch.int32) for blocks in planner.blocks[part]]
    size = planner.block_size
    pairs = zip(planner.blocks[part], seq_lens, strict=True)
    slots = [blocks[i // size] * size + i % size for blocks, length in pairs for i in range(length)]

    def on_device(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    return PhaseRows(
        tokens=slice(begin, begin + count),
        has_cached=any(step.cached_lens[part]),
        num_q_heads=step.num_q_heads,
        num_kv_heads=step.num_kv_heads,
        head_size=step.head_size - (step.size_v if step.latent else 0),
        head_size_v=step.size_v,
        scale=step.scale,
        latent_size=step.size_v if step.latent else None,
        block_size=size,
        dtype=getattr(torch, planner.backend.agreement.requirements.dtype),
        max_query=max(query_lens),
        max_keys=max(seq_lens),
        query_starts=on_device([0, *query_lens]).cumsum(0, dtype=torch.int32),
        keys=on_device(list(seq_lens)),
        key_starts=on_device([0, *seq_lens]).cumsum(0, dtype=torch.int32),
        table=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(device),
        slots=on_device(slots),
    )


@frozen(eq=False, kw_only=True)
class PhaseRows:
    """
    The decodes or the prefills of a step. Tensors are int32, on the device.

    Attributes:
        tokens: Their rows in the step.
        has_cached: Whether some of their keys are cached before the step.
        num_q_heads: The number of query heads.
        num_kv_heads: The number of KV heads.
        head_size: The head size of keys; of latents the size of their rotary part.
        head_size_v: The head size of values.
        scale: The softmax scale.
        latent_size: The elements of a query before its rotary part; None without latents.
        block_size: Slots per block.
        dtype: The dtype of queries, keys and values.
        max_query: The most new tokens of a request.
        max_keys: The most keys of a request.
        query_starts: ``(requests + 1,)``, the first row of each request.
        keys: ``(requests,)``, keys per request, with the new ones.
        key_starts: ``(requests + 1,)``, the first key of each request, packed.
        table: ``(requests, columns)``, the block table.
        slots: ``(sum of keys,)``, the slot of each key.
    """

    tokens: slice
    has_cached: bool
    num_q_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    scale: float
    latent_size: int | None
    block_size: int
    dtype: torch.dtype
    max_query: int
    max_keys: int
    query_starts: Tensor
    keys: Tensor
    key_starts: Tensor
    table: Tensor
    slots: Tensor


class Calls(ABC):
    """
    The calls of a library.

    Attributes:
        fills_output: Whether results are written into `out`; otherwise they are new tensors.
        schedules: Whether `schedule` returns schedules.
    """

    fills_output: ClassVar[bool] = False
    schedules: ClassVar[bool] = False

    def schedule(self, rows: PhaseRows) -> Tensor | None:
        """Return the schedule of a call; None if it has none."""
        del rows
        return None

    @abstractmethod
    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: PhaseRows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """
        Return the call.

        Args:
            query: ``(tokens, num_q_heads, head_size)``; of latents their elements come before.
            key: ``(num_blocks, block_size, num_kv_heads, head_size)``, or ``(tokens, num_kv_heads, head_size)`` if
                nothing is cached.
            value: In the form of `key`.
            out: ``(tokens, num_q_heads, head_size_v)``.
            rows: The requests of the rows.
            schedule: From `schedule`.
        """


class Fa2(Calls):
    """`flash_attn`: its call for packed rows, with split-KV for decodes."""

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: PhaseRows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the call."""
        del out, schedule
        import flash_attn  # noqa: PLC0415 - requires a GPU

        lengths = (rows.query_starts, rows.key_starts, rows.max_query, rows.max_keys)
        keywords = {"block_table": rows.table if rows.has_cached else None, "softmax_scale": rows.scale, "causal": True}
        return partial(flash_attn.flash_attn_varlen_func, query, key, value, *lengths, **keywords)


class Fa2Vllm(Calls):
    """The op `varlen_fwd`."""

    fills_output = True

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: PhaseRows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the op with its arguments in the order of its schema."""
        del schedule
        keys = (rows.keys, None, rows.table) if rows.has_cached else (None, None, None)
        lengths = (rows.query_starts, rows.key_starts, *keys, None)
        scalars = (rows.max_query, rows.max_keys, 0.0, rows.scale, False, True, -1, -1, 0.0, False, 0, None)
        return partial(torch.ops._vllm_fa2_C.varlen_fwd.default, query, key, value, out, *lengths, *scalars)  # noqa: SLF001 - the op's name


class Fa3(Calls):
    """`flash_attn_interface`: its call with a KV cache, for any number of rows per request, or the one without."""

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: PhaseRows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the call."""
        del out, schedule
        import flash_attn_interface  # noqa: PLC0415 - requires a GPU

        if not rows.has_cached:
            lengths = (rows.query_starts, rows.key_starts, rows.max_query, rows.max_keys)
            keywords: dict[str, Any] = {"softmax_scale": rows.scale, "causal": True}
            return partial(flash_attn_interface.flash_attn_varlen_func, query, key, value, *lengths, **keywords)
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
    """The ops `fwd` and `get_scheduler_metadata` of the wheels of vLLM."""

    fills_output = True
    schedules = True
    library: ClassVar[str] = "_vllm_fa3_C"
    windows: ClassVar[tuple[int, ...]] = (-1, -1)
    after_sinks: ClassVar[tuple[int | None, ...]] = (1, 0, None)

    def longest_scheduled(self, rows: PhaseRows) -> int:
        """Return the maximum number of keys that the kernel assumes."""
        return rows.max_keys

    def schedule(self, rows: PhaseRows) -> Tensor | None:
        """Return the schedule of a call with pages."""
        if not rows.has_cached:
            return None
        sizes = (rows.num_q_heads, rows.num_kv_heads, rows.head_size, rows.head_size_v, rows.dtype)
        lengths = (rows.keys, rows.query_starts, None, None, None, None, rows.block_size, 0)
        schedule = getattr(torch.ops, self.library).get_scheduler_metadata.default
        longest, scalars = self.longest_scheduled(rows), (True, *self.windows, False, 0, None, 0)
        metadata: Tensor = schedule(len(rows.keys), rows.max_query, longest, *sizes, *lengths, *scalars)
        return metadata

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: PhaseRows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the op with its arguments in the order of its schema."""
        none = (None,) * 3
        latent = None
        if rows.latent_size is not None:
            latent, query = query[..., : rows.latent_size], query[..., rows.latent_size :]
        starts, keys, table = (None, rows.keys, rows.table) if rows.has_cached else (rows.key_starts, None, None)
        lengths = (rows.query_starts, starts, None, None, keys, rows.max_query, rows.max_keys, table)
        scalars = (rows.scale, True, *self.windows, 0.0, True, schedule, 0, None, 0, None, *self.after_sinks)
        fwd = getattr(torch.ops, self.library).fwd.default
        # key_new, value_new; batch indices, padding, rotary embedding (3); descales
        return partial(fwd, query, key, value, None, None, latent, out, *lengths, None, None, *none, *none, *scalars)


class Fa3Tokenspeed(Fa3Vllm):
    """The same ops of `tokenspeed-fa3`, whose windows have an attention chunk behind them."""

    library = "flash_attn_3"
    windows = (-1, -1, 0)
    after_sinks = ()

    def longest_scheduled(self, rows: PhaseRows) -> int:
        """Return the slots of a row of the block table."""
        return rows.table.shape[1] * rows.block_size


class Fa4(Calls):
    """`flash_attn.cute`: the function that its public one calls, as in engines. The public one allocates its output."""

    fills_output = True

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: PhaseRows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the call."""
        del schedule
        from flash_attn.cute.interface import _flash_attn_fwd  # noqa: PLC0415 - requires a GPU, and takes seconds

        keywords: dict[str, Any] = {
            "cu_seqlens_q": rows.query_starts,
            **(
                {"seqused_k": rows.keys, "page_table": rows.table}
                if rows.has_cached
                else {"cu_seqlens_k": rows.key_starts}
            ),
            "max_seqlen_q": rows.max_query,
            "max_seqlen_k": rows.max_keys,
            "softmax_scale": rows.scale,
            "causal": True,
            "out": out,
        }
        return partial(_flash_attn_fwd, query, key, value, **keywords)


class Torch(Calls):
    """The op of torch: paged keys are packed into buffers that are reused."""

    def bind(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, rows: PhaseRows, schedule: Tensor | None
    ) -> Callable[[], Tensor]:
        """Return the op with the packing of its keys."""
        del out, schedule
        lengths = (rows.query_starts, rows.key_starts, rows.max_query, rows.max_keys)
        scalars = {"dropout_p": 0.0, "is_causal": True, "return_debug_mask": False, "scale": rows.scale}
        attend: Any = partial(torch.ops.aten._flash_attention_forward.default, query)  # noqa: SLF001 - the op's name
        if not rows.has_cached:
            return lambda: attend(key, value, *lengths, **scalars)[0]
        pages = tuple(cache.flatten(0, 1) for cache in (key, value))
        packed = tuple(cache.new_empty(len(rows.slots), *cache.shape[1:]) for cache in pages)

        def call() -> Any:
            for cache, into in zip(pages, packed, strict=True):
                torch.index_select(cache, 0, rows.slots, out=into)
            return attend(*packed, *lengths, **scalars)[0]

        return call


CALLS: Final[Mapping[str, Calls]] = MappingProxyType(
    {
        "fa2": Fa2(),
        "fa2_vllm": Fa2Vllm(),
        "fa3": Fa3(),
        "fa3_vllm": Fa3Vllm(),
        "fa3_tokenspeed": Fa3Tokenspeed(),
        "fa4": Fa4(),
        "torch": Torch(),
    }
)
"""The calls of each variant."""
