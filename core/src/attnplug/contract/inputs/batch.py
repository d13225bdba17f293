"""One step's requests, as a host passes them: tensors, their CPU copies, and numbers."""

from __future__ import annotations

import reprlib
from itertools import accumulate
from operator import attrgetter, index
from typing import TYPE_CHECKING, Any, Final, TypeVar

import attrs
import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.contract.inputs.upload import upload
from attnplug.errors import BatchError, TensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

_T = TypeVar("_T")

PAD_SLOT_ID: Final = -1
"""The slot of a token whose K/V are not written."""


@frozen(eq=False, kw_only=True)
class Batch:
    """
    One step's requests, in any order. All index tensors are int32, slots are int64.

    Decodes are the requests at the front with a query of at most the agreed decode query length. Short queries behind
    the first longer one count as prefills: the result is the same, and decodes are fastest where they come first.

    A batch describes one step: its tensors are not changed while it is in use (graph buffers belong
    to `State`). Every name ending in ``_cpu`` is the host's copy of the device tensor of that name; where the tensor
    itself is on the CPU it is its own copy and need not be given twice. The guards of `StepBuilder.build` read host
    copies alone.

    Attributes:
        query_start_loc: ``(num_reqs + 1,)`` exclusive cumulative sum of the query lengths.
        seq_lens: ``(num_reqs,)`` keys per request, this step's included. For dense calls: the lengths of the given K/V.
            For paged cross attention: the decoder's tokens, and `encoder_seq_lens` counts the keys.
        num_reqs: Requests, padded ones included. A padded request has query length 0, or is counted by
            `num_padded_reqs`; in graphs, and where a step is advanced, they come last.
        num_actual_tokens: Query tokens, or an upper bound; rows beyond the last query are padding. No eager step
            touches them.
        max_query_len: The longest query, or an upper bound. Plugins see the exact values of both.
        max_seq_len: The longest sequence, or an upper bound. Plugins see the exact value where the CPU lengths are
            exact.
        block_table: ``(num_reqs, max_blocks)`` int32, physical block of each logical block; None for dense calls.
            Entries beyond a request's length are not read.
        slot_mapping: ``(tokens,)`` int64, the cache slot of each K/V row of the call, PAD_SLOT_ID where none is
            written; None for dense calls, and with `kv_in_cache` where nothing is written: block 0 may have keys then.
        causal: Whether a token attends to no later token. It is the agreement's: a host that needs both has two.
        common_prefix_len: Tokens at the start that all requests share, in the same blocks (cascade); 0 for none.
        query_start_loc_cpu: CPU copy; absent where `query_lens_cpu_kind` says so: each build reads it then.
        seq_lens_cpu: CPU copy; exact, an upper bound or absent, as the requirements' `seq_lens_cpu_kind` says.
        num_computed_tokens_cpu: ``(num_reqs,)`` keys cached before this step; None derives it from the lengths.
        block_table_cpu: CPU copy, optional on a device: with it block numbers are checked.
        slot_mapping_cpu: CPU copy, optional on a device: with it slots are checked.
        encoder_seq_lens: ``(num_reqs,)`` encoder tokens per request (paged cross attention).
        encoder_seq_lens_cpu: CPU copy.
        dcp_local_seq_lens: ``(num_reqs,)`` keys that this rank holds (decode context parallelism).
        dcp_local_seq_lens_cpu: CPU copy.
        key_start_loc: ``(num_reqs + 1,)`` as `query_start_loc`, for the K/V rows of dense calls.
        key_start_loc_cpu: CPU copy; absent where `seq_lens_cpu_kind` says so: then all K/V rows of a call are keys.
        derived: Values that `cached` has computed, and the exact batch that builders have made of this one.
        custom_mask: ``(sum(query_len * seq_len),)`` bool, the requests' ``(query_len, seq_len)`` masks one after
            another, True where a key is attended to. In metadata of a graph:
            ``(num_reqs, query_len, max_seq_len)`` of the graph, False beyond a request's sequence and for padding.
        attn_bias: ``(1 or num_q_heads, sum(query_len * seq_len))`` in the layer's dtype, the requests' additive masks
            one after another: it is added to the scaled, capped scores. -inf counts as the dtype's lowest number, so
            that a query of nothing else attends to all keys alike; hide keys by `custom_mask`.
        mm_prefix_range: ``(tokens, 2)`` int32, the first and the last position of the span that each query token is in,
            such as an image's; -1 and -1 outside of spans. A token attends to the span's keys, whatever window or
            causal mask hides them, and to no key beyond its sequence. None where no token is in a span.
        mm_prefix_range_cpu: CPU copy.
        max_encoder_seq_len: The longest encoder, for paged cross attention; follows from `encoder_seq_lens_cpu`.
        extra: Values of open features, by the feature's name. Only features that were requested. Such a batch
            runs eagerly.
        dummy: Whether it takes the place of a real batch: it reads the null block, and writes nothing. Real pages and
            slots are replaced.
        num_padded_reqs: The last requests are padding, whatever they hold: they write nothing, and plugins do not see
            them. Their output rows are those beyond the actual tokens.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table: Tensor | None = None
    slot_mapping: Tensor | None = None
    causal: bool = True
    common_prefix_len: int = 0
    query_start_loc_cpu: Tensor | None = field()
    seq_lens_cpu: Tensor | None = field()
    num_computed_tokens_cpu: Tensor | None = None
    block_table_cpu: Tensor | None = field()
    slot_mapping_cpu: Tensor | None = field()
    encoder_seq_lens: Tensor | None = None
    encoder_seq_lens_cpu: Tensor | None = field()
    dcp_local_seq_lens: Tensor | None = None
    dcp_local_seq_lens_cpu: Tensor | None = field()
    key_start_loc: Tensor | None = None
    key_start_loc_cpu: Tensor | None = field()
    custom_mask: Tensor | None = None
    attn_bias: Tensor | None = None
    mm_prefix_range: Tensor | None = None
    mm_prefix_range_cpu: Tensor | None = field()
    max_encoder_seq_len: int | None = field()
    extra: Mapping[str, Any] = field(factory=dict)
    dummy: bool = False
    num_padded_reqs: int = 0
    derived: dict[Hashable, Any] = field(init=False, factory=dict, repr=False)

    @query_start_loc_cpu.default
    def _own_query_start_loc(self) -> Tensor | None:
        return _mirror("query_start_loc", self.query_start_loc)

    @seq_lens_cpu.default
    def _own_seq_lens(self) -> Tensor | None:
        return _mirror("seq_lens", self.seq_lens)

    @block_table_cpu.default
    def _own_block_table(self) -> Tensor | None:
        return _mirror("block_table", self.block_table)

    @slot_mapping_cpu.default
    def _own_slot_mapping(self) -> Tensor | None:
        return _mirror("slot_mapping", self.slot_mapping)

    @encoder_seq_lens_cpu.default
    def _own_encoder_seq_lens(self) -> Tensor | None:
        return None if self.encoder_seq_lens is None else _mirror("encoder_seq_lens", self.encoder_seq_lens)

    @mm_prefix_range_cpu.default
    def _own_mm_prefix_range(self) -> Tensor | None:
        return _mirror("mm_prefix_range", self.mm_prefix_range)

    @max_encoder_seq_len.default
    def _longest_encoder(self) -> int | None:
        lens = self.encoder_seq_lens_cpu
        if lens is None:
            return None
        check_tensor("encoder_seq_lens_cpu", lens)
        return int(lens.amax()) if lens.is_cpu and lens.numel() else None  # on a device it is refused in build

    @dcp_local_seq_lens_cpu.default
    def _own_dcp_local_seq_lens(self) -> Tensor | None:
        return None if self.dcp_local_seq_lens is None else _mirror("dcp_local_seq_lens", self.dcp_local_seq_lens)

    @key_start_loc_cpu.default
    def _own_key_start_loc(self) -> Tensor | None:
        return None if self.key_start_loc is None else _mirror("key_start_loc", self.key_start_loc)

    @classmethod
    def from_lengths(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int] | None = None,
        *,
        block_table: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        device: torch.device | str | None = None,
        **rest: Any,
    ) -> Batch:
        """
        Return a batch from plain lengths; what follows from them is derived.

        Args:
            query_lens: New tokens of each request.
            seq_lens: Keys of each request; None is a first prefill (`query_lens`).
            block_table: ``(num_reqs, max_blocks)`` int32, on any device; None makes a dense batch with `key_start_loc`.
            slot_mapping: ``(tokens,)`` int64, on any device.
            device: Where the batch's tensors go; None is the block table's, else the CPU. Tensors given on the CPU are
                kept as CPU copies. Copies to a GPU are ordered with the current stream, and nothing waits for them.
            rest: Further fields of `Batch`, by name.

        Raises:
            BatchError: The lengths are not whole numbers, are no int32, or there are not as many of each.
            TensorError: The block table or the slot mapping is no tensor.
        """
        queries = whole_numbers("query_lens", query_lens)
        lengths = queries if seq_lens is None else whole_numbers("seq_lens", seq_lens)
        _check_alike(queries, lengths)
        _check_int32("query_lens", queries)
        _check_int32("seq_lens", lengths, together=block_table is None)
        for name, given in (("block_table", block_table), ("slot_mapping", slot_mapping)):
            if given is not None:
                check_tensor(name, given)
        if device is None and block_table is not None:
            device = block_table.device
        place = None if device is None else torch.device(device)
        host = {"query_start_loc": _cumulative(queries), "seq_lens": _int32(lengths)}
        if block_table is None:
            host["key_start_loc"] = _cumulative(lengths)
        else:
            host["block_table"] = block_table
        if slot_mapping is not None:
            host["slot_mapping"] = slot_mapping
        fields: dict[str, Any] = {}
        for name, tensor in host.items():
            fields[name] = tensor if place is None else _placed(tensor, place)
            fields[f"{name}_cpu"] = _mirror(name, tensor)
        derived = {
            "num_reqs": len(queries),
            "num_actual_tokens": sum(queries),
            "max_query_len": max(queries, default=0),
            "max_seq_len": max(lengths, default=0),
        }
        return cls(**{**fields, **derived, **rest})

    def to_dict(self) -> dict[str, Any]:
        """
        Return what the engine gave, as plain numbers and tensors by name, for another rank: ``Batch(**data)`` there.

        Nothing that a builder derived comes along.
        """
        fields = {field.name: getattr(self, field.name) for field in attrs.fields(Batch) if field.init}
        return {name: value for name, value in fields.items() if value is not None}

    def cached(self, key: Hashable, compute: Callable[[], _T]) -> _T:
        """
        Return `compute()`, evaluated once for this batch.

        What several builders derive from the same batch, CSR pages say, is shared that way.
        """
        if key not in self.derived:
            self.derived[key] = compute()
        found: _T = self.derived[key]
        return found


# --- machinery ---

# A step changes its batch, often more than once. `attrs.evolve` takes three times as long: it goes through `__init__`.
_GIVEN: Final = tuple(each.name for each in attrs.fields(Batch) if each.init)
_values_of: Final = attrgetter(*_GIVEN)
_WRITE: Final[Mapping[str, Callable[[Batch, Any], None]]] = {
    each.name: vars(Batch)[each.name].__set__ for each in attrs.fields(Batch)
}
_WRITE_GIVEN: Final = tuple(_WRITE[name] for name in _GIVEN)


def with_fields(batch: Batch, **fields: Any) -> Batch:
    """
    Return a batch with other fields, as `attrs.evolve` does; nothing that was derived comes along.

    Args:
        batch: The batch that is left as it is.
        fields: Fields of `Batch`, by name.
    """
    if type(batch) is not Batch:  # a host's own class, with fields that are unknown here
        return attrs.evolve(batch, **fields)
    made = object.__new__(Batch)
    for write, value in zip(_WRITE_GIVEN, _values_of(batch), strict=True):
        write(made, value)
    for name, value in fields.items():
        _WRITE[name](made, value)
    _WRITE["derived"](made, {})
    return made


def whole_numbers(name: str, given: Iterable[int]) -> list[int]:
    """
    Return lengths as Python numbers.

    Raises:
        BatchError: They are no lengths, or not whole.
    """
    try:
        return list(map(index, given))
    except TypeError:
        raise BatchError(
            f"{name}={reprlib.repr(given)} was given",
            f"{name} is a list with a whole number per request",
            "pass Python ints, one per request",
        ) from None


def _check_int32(name: str, lengths: list[int], *, together: bool = True) -> None:
    """Check that lengths, and where they are added up their sum, are int32."""
    most = max(sum(filter(_is_positive, lengths)) if together else 0, *lengths, 0)
    if most >= 2**31 or min(lengths, default=0) < -(2**31):
        raise BatchError(
            f"{name}={reprlib.repr(lengths)} was given",
            f"each of {name}{', and their sum,' if together else ''} is less than 2**31",
            "pass the lengths of one step",
        )


def _is_positive(length: int) -> bool:
    return length > 0


def check_tensor(name: str, given: object) -> None:
    """
    Check that what should be a tensor is one.

    Raises:
        TensorError: It is something else.
    """
    if not isinstance(given, Tensor):
        raise TensorError(
            f"{name}={reprlib.repr(given)} was given",
            f"{name} is a tensor",
            f"pass torch.tensor({name}, dtype={'torch.int64' if name == 'slot_mapping' else 'torch.int32'})",
        )


def _mirror(name: str, device_copy: Tensor | None) -> Tensor | None:
    """Return a tensor on the CPU as its own CPU copy; None for a tensor on a device."""
    if device_copy is None:
        return None
    check_tensor(name, device_copy)
    return device_copy if device_copy.device.type == "cpu" else None


def _placed(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. A copy from pageable memory to a GPU would wait for all that runs there."""
    return upload(tensor, device) if tensor.is_cpu and device.type == "cuda" else tensor.to(device)


def _check_alike(queries: Sequence[int], lengths: Sequence[int]) -> None:
    if len(queries) != len(lengths):
        raise BatchError(
            f"{len(queries)} query_lens and {len(lengths)} seq_lens were given",
            "each request has a query and a sequence, which counts the query too",
            "pass lists of equal length, or leave seq_lens out for first prefills",
        )


def _int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return _int32([0, *accumulate(lengths)])
