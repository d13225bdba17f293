"""Checks a batch against itself, the agreement and the limits, from CPU copies: it never waits for a device."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Final, NoReturn

import torch

from attnplug.contract.guards._format import check_index, check_mirror
from attnplug.contract.guards.dense import check_dense
from attnplug.contract.guards.negotiated import check_negotiated, is_plain, requests_plain
from attnplug.contract.guards.pages import PageGuard, check_null_padding, check_slots_beyond
from attnplug.contract.inputs.batch import Batch
from attnplug.contract.inputs.exact import exact_batch, length_terms, with_lengths, with_null_pages
from attnplug.contract.inputs.phase import BatchSplit, count_decodes
from attnplug.errors import BatchError, NotNegotiatedError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.exact import Lengths
    from attnplug.contract.inputs.limits import Limits
    from attnplug.negotiation.agreement import Agreement

_COUNTS: Final = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "common_prefix_len")
_counts_of: Final = attrgetter(*_COUNTS)
_INTS: Final = {int}
_indexes_of: Final = attrgetter(
    *("query_start_loc", "seq_lens", "block_table", "slot_mapping"),
    *("query_start_loc_cpu", "seq_lens_cpu", "block_table_cpu", "slot_mapping_cpu"),
)


def refuse_batch(batch: object, where: str) -> NoReturn:
    """Raise for something else than a batch."""
    raise BatchError(
        f"{reprlib.repr(batch)} was given to {where}",
        "it takes a Batch: this step's requests",
        "pass what BatchAssembler.finish, or Batch.from_lengths, returns",
    )


def check_batches(batches: object) -> None:
    """
    Check that what should be a step's batches is a mapping of builders to them.

    Raises:
        BatchError: It is something else.
    """
    if not isinstance(batches, Mapping):
        raise BatchError(
            f"a {type(batches).__name__} was given to begin_forward",
            "a step has a batch for each builder: layers that share a block table share a builder",
            "pass {builder: batch}",
        )
    for batch in batches.values():
        if not isinstance(batch, Batch):
            refuse_batch(batch, "begin_forward")


class BatchGuard:
    """
    Compares the batches of one builder, made exact, with the agreement and the limits.

    Args:
        agreement: What was negotiated.
        limits: The most that batches need.
        device: Where their tensors are.
        requires_uniform_decodes: `MetadataBuilder.requires_uniform_decodes`.

    Attributes:
        terms: What the agreement says about lengths.
    """

    def __init__(
        self, agreement: Agreement, limits: Limits, device: torch.device, *, requires_uniform_decodes: bool = False
    ) -> None:
        requested = agreement.requirements
        self.terms = length_terms(agreement)
        self._agreement = agreement
        self._requested = requested
        self._uniform = requires_uniform_decodes
        self._limits = limits
        self._most = (limits.max_num_reqs, limits.max_num_tokens, limits.max_seq_len)
        self._device_type = device.type
        self._size = agreement.block_size or 1
        self._pages = PageGuard(agreement, limits.num_blocks, device.type) if requested.paged else None
        self._requests_plain = requests_plain(requested)
        # Without a cache, or without a decode phase, there are no decodes: a short sequence is a short prefill.
        self._threshold = requested.decode_query_len if requested.paged and "decode" in requested.phases else 0
        self._orders_keys = requested.attn_type != "encoder_decoder" and (
            bool(requested.paged) or bool(requested.causal)
        )

    def check(self, batch: Batch, *, in_place: bool = False) -> BatchSplit:
        """
        Return the split of a batch, with the exact batch.

        Args:
            batch: The batch as the host gave it.
            in_place: Whether a graph reads the batch's own tensors: then their padding is checked too.

        Raises:
            ContractError: The batch contradicts itself, the agreement or the limits; see `StepBuilder.build`.
        """
        counts = reqs, tokens, _, longest, _ = _counts_of(batch)
        most_reqs, most_tokens, most_keys = self._most
        if not (
            {*map(type, counts)} == _INTS
            and 0 < reqs <= most_reqs
            and 0 < tokens <= most_tokens
            and longest <= most_keys
            and batch.max_encoder_seq_len is None
        ):
            self._check_each_count(batch)
        exact, lengths = exact_batch(batch, self.terms)
        if in_place and batch.num_padded_reqs:
            check_null_padding(with_lengths(batch, self.terms), self._size)
        if exact.dummy and not in_place:
            exact = with_null_pages(exact, self.terms, lengths, self._size)
        is_usual = self._is_of_usual_form(exact)
        query_lens = lengths.query_lens
        if query_lens is None or not is_usual:
            query_lens = self._check_queries(exact, lengths)
        if exact.num_actual_tokens != tokens and not batch.num_padded_reqs and (in_place or not exact.dummy):
            check_slots_beyond(batch, exact.num_actual_tokens)
        seq_lens = self._check_lengths(exact, lengths, query_lens, is_usual=is_usual)
        if not (self._requests_plain and exact.causal is self._requested.causal and is_plain(exact)):
            check_negotiated(exact, self._agreement, query_lens, self._device_type, is_exact=self.terms.exact)
        num_decodes, num_decode_tokens = self._count_decodes(exact, lengths, query_lens)
        if self._pages is not None:
            rows, highest = self._pages.check(exact, query_lens, seq_lens, is_usual=is_usual)
        else:
            rows, highest = check_dense(exact, seq_lens, self._device_type, is_exact=self.terms.exact), -1
        return BatchSplit(
            batch=exact,
            num_decodes=num_decodes,
            num_prefills=exact.num_reqs - num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=exact.num_actual_tokens - num_decode_tokens,
            num_key_rows=rows,
            highest_block=highest,
        )

    def _is_of_usual_form(self, batch: Batch) -> bool:
        """
        Whether the index tensors of a paged batch have the forms that they should, and no CPU copy has to be compared.

        It says in one function what the guards find out, and word, one by one.
        """
        starts, lens, table, slots, starts_cpu, lens_cpu, table_cpu, slots_cpu = _indexes_of(batch)
        if self._pages is None or table is None or slots is None or batch.key_start_loc is not None:
            return False
        reqs, device = batch.num_reqs, starts.device
        of_starts, of_requests, of_table, of_slots = starts.shape, lens.shape, table.shape, slots.shape
        if not (
            device.type == self._device_type
            and of_starts == (reqs + 1,)
            and of_requests == (reqs,)
            and len(of_table) == 2
            and of_table[0] == reqs
            and (of_table[1] <= 1 or table.stride()[1] == 1)
            and len(of_slots) == 1
            and of_slots[0] >= batch.num_actual_tokens
            and starts.dtype is lens.dtype is table.dtype is torch.int32
            and slots.dtype is torch.int64
            and device == lens.device == table.device == slots.device
        ):
            return False
        if self._device_type == "cpu":
            return starts is starts_cpu and lens is lens_cpu and table is table_cpu and slots is slots_cpu
        for copy, shape, dtype in (
            (starts_cpu, of_starts, torch.int32),
            (lens_cpu, of_requests, torch.int32),
            (table_cpu, of_table, torch.int32),
            (slots_cpu, of_slots, torch.int64),
        ):
            if copy is not None and not (copy.is_cpu and copy.dtype is dtype and copy.shape == shape):
                return False
        return True

    def _check_each_count(self, batch: Batch) -> None:
        """Compare number by number, and word what is wrong."""
        for name in _COUNTS:
            count = getattr(batch, name)
            if type(count) is not int:
                raise BatchError(
                    f"{name}={count!r} was given",
                    f"{name} is a Python int, known without reading a device",
                    "pass int(...)",
                )
        limits = self._limits
        if batch.num_reqs < 1 or batch.num_actual_tokens < 1:
            raise BatchError(
                f"a batch of {batch.num_reqs} requests and {batch.num_actual_tokens} tokens was given",
                "a batch has at least one request and one token",
                "skip the step when nothing is scheduled",
            )
        for name, count, most in (
            ("num_reqs", batch.num_reqs, limits.max_num_reqs),
            ("num_actual_tokens", batch.num_actual_tokens, limits.max_num_tokens),
            ("max_seq_len", batch.max_seq_len, limits.max_seq_len),
        ):
            if count > most:
                bound = (
                    "max_num_tokens"
                    if name == "num_actual_tokens"
                    else name
                    if name.startswith("max")
                    else f"max_{name}"
                )
                raise BatchError(
                    f"a batch with {name}={count} was given",
                    f"the state was made for {bound}={most}",
                    f"schedule less, or make the state with Limits({bound}={count}, ...) or more",
                )
        longest = batch.max_encoder_seq_len
        if longest is not None and (type(longest) is not int or longest > limits.max_seq_len):
            raise BatchError(
                f"a batch with max_encoder_seq_len={longest!r} was given",
                f"the state was made for max_seq_len={limits.max_seq_len} keys per request: here they are an encoder's",
                f"make the state with Limits(max_seq_len={longest}, ...) or more",
            )

    def _check_queries(self, batch: Batch, lengths: Lengths) -> Tensor:
        """Return the query lengths on the CPU."""
        check_index("query_start_loc", batch.query_start_loc, (batch.num_reqs + 1,), torch.int32, self._device_type)
        host = check_mirror("query_start_loc", batch.query_start_loc, batch.query_start_loc_cpu)
        return _refuse_starts(batch, host) if lengths.query_lens is None else lengths.query_lens

    def _check_lengths(self, batch: Batch, lengths: Lengths, query_lens: Tensor, *, is_usual: bool) -> Tensor | None:
        """Return the exact CPU sequence lengths; None where the host does not know them."""
        shape, computed = (batch.num_reqs,), batch.num_computed_tokens_cpu
        if not is_usual:
            check_index("seq_lens", batch.seq_lens, shape, torch.int32, self._device_type)
        exact = self.terms.exact
        if batch.seq_lens_cpu is None and not exact:
            least = batch.max_query_len if self._orders_keys else 0
            if batch.max_seq_len < least:
                _refuse_longest(batch.max_seq_len, least)
            if computed is not None:
                check_index("num_computed_tokens_cpu", computed, shape, torch.int32, "cpu")
            return None
        host = batch.seq_lens_cpu
        if host is None or not is_usual:
            host = check_mirror("seq_lens", batch.seq_lens, host, exact=exact)
        assert lengths.seq_range is not None  # noqa: S101 - of a CPU copy of this form
        low, high = lengths.seq_range
        if batch.max_seq_len < high:
            _refuse_longest(batch.max_seq_len, high)
        # Where the shortest sequence is as long as the longest query, all are as long as their own.
        may_be_short = self._orders_keys and low < batch.max_query_len
        if low < 0 or (may_be_short and int((host - query_lens).amin()) < 0):
            _refuse_short(host, query_lens)
        if computed is not None:
            _check_computed(computed, host - query_lens, exact=exact)
        return host if exact else None

    def _count_decodes(self, batch: Batch, lengths: Lengths, query_lens: Tensor) -> tuple[int, int]:
        """Return the number of decodes, which end before the first longer query, and of their tokens."""
        threshold, longest = self._threshold, batch.max_query_len
        if longest > threshold and "prefill" not in self._requested.phases:
            raise NotNegotiatedError(
                f"a batch with a query of {longest} tokens was given",
                f"{self._agreement.id} was selected for decodes alone, of at most {threshold} tokens",
                f"select again with phases=('prefill', 'decode') or decode_query_len={longest}",
            )
        if longest <= threshold and not self._uniform:
            return batch.num_reqs, batch.num_actual_tokens
        if threshold == 0 or (lengths.is_packed and longest > threshold):
            return 0, 0
        if lengths.is_packed:  # padding ends decodes of one length
            return batch.num_actual_tokens // longest, batch.num_actual_tokens
        lens: list[int] = query_lens.tolist()
        num_decodes = count_decodes(lens, threshold, uniform=self._uniform)
        return num_decodes, sum(lens[:num_decodes])


def _refuse_starts(batch: Batch, host: Tensor) -> NoReturn:
    """Raise for starts that are not in order, or beyond the counts."""
    starts: list[int] = host.tolist()
    lens = [end - start for start, end in pairwise(starts)]
    if starts[0] == 0 and min(lens) >= 0 and 0 < starts[-1] <= batch.num_actual_tokens:
        raise BatchError(
            f"max_query_len={batch.max_query_len} was given",
            f"the longest query has {max(lens)} tokens, and max_query_len is at least that",
            f"pass max_query_len={max(lens)}",
        )
    fall = next((index for index, length in enumerate(lens) if length < 0), None)
    found = f"it starts at {starts[0]} and ends at {starts[-1]}"
    if fall is not None:
        found += f", and falls from {starts[fall]} to {starts[fall + 1]} at request {fall}"
    raise BatchError(
        f"a query_start_loc was given, and {found}",
        f"it starts at 0, never falls, and ends at 1 to num_actual_tokens={batch.num_actual_tokens}",
        "pass [0, *itertools.accumulate(query_lens)], or use Batch.from_lengths",
    )


def _refuse_longest(bound: int, longest: int) -> NoReturn:
    raise BatchError(
        f"max_seq_len={bound} was given",
        f"the longest sequence has {longest} tokens, and max_seq_len is at least that",
        f"pass max_seq_len={longest} or more",
    )


def _refuse_short(seq_lens: Tensor, query_lens: Tensor) -> None:
    short = int((seq_lens - query_lens.clamp(min=0)).argmin())
    raise BatchError(
        f"request {short} has a sequence of {int(seq_lens[short])} tokens and a query of {int(query_lens[short])}",
        "a sequence counts its query too: seq_len >= query_len, and no length is negative",
        "pass seq_len = computed tokens + query tokens",
    )


def _check_computed(computed: Tensor, contexts: Tensor, *, exact: bool) -> None:
    check_index("num_computed_tokens_cpu", computed, tuple(contexts.shape), torch.int32, "cpu")
    if exact and torch.equal(computed, contexts):
        return
    wrong = computed.ne(contexts) if exact else (computed < 0) | (computed > contexts)
    if bool(wrong.any()):
        index = int(wrong.int().argmax())
        raise BatchError(
            f"request {index} has num_computed_tokens={int(computed[index])}",
            f"its lengths leave {int(contexts[index])}: seq_len - query_len" + ("" if exact else ", at most"),
            "leave num_computed_tokens_cpu out, and it follows from the lengths",
        )
