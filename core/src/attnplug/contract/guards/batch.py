"""Checks a batch against itself, the agreement and the limits, from CPU copies: it never waits for a device."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Final

import torch
from attrs import frozen

from attnplug.contract.guards._format import check_index, check_mirror, extremes
from attnplug.contract.guards.dense import check_dense
from attnplug.contract.guards.negotiated import check_negotiated
from attnplug.contract.guards.normalize import (
    as_dummy,
    check_null_padding,
    keep_lengths,
    longest_of,
    note_sizes,
    with_exact_counts,
    with_exact_longest,
    with_exact_queries,
    with_lengths,
    without_padding,
)
from attnplug.contract.guards.pages import PageGuard
from attnplug.contract.inputs.batch import Batch
from attnplug.contract.inputs.phase import BatchSplit, count_decodes, packed_query_lens
from attnplug.errors import BatchError, NotNegotiatedError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.limits import Limits
    from attnplug.negotiation.agreement import Agreement

_COUNTS: Final = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "common_prefix_len")
_counts_of: Final = attrgetter(*_COUNTS)
_INTS: Final = {int}


def check_batch(batch: object, where: str) -> None:
    """
    Check that what should be a batch is one.

    Raises:
        BatchError: It is something else.
    """
    if not isinstance(batch, Batch):
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
        check_batch(batch, "begin_forward")


@frozen(eq=False)
class Checked:
    """
    A checked batch, for a graph.

    Attributes:
        split: The split, with the batch as plugins see it: exact numbers for bounds, and no padded requests.
        given: The batch that the graph takes: that of the split, or the host's own with its padding.
        query_len: The query length of all requests that have a query, the others come last; None says nothing.
    """

    split: BatchSplit
    given: Batch
    query_len: int | None


class BatchGuard:
    """Checks the batches of one builder."""

    def __init__(
        self, agreement: Agreement, limits: Limits, device: torch.device, *, requires_uniform_decodes: bool = False
    ) -> None:
        requested = agreement.requirements
        self._agreement = agreement
        self._requested = requested
        self._uniform = requires_uniform_decodes
        self._reads_lengths = agreement.reads_lengths
        self._reads_queries = requested.query_lens_cpu_kind == "absent"
        self._is_exact = requested.seq_lens_cpu_kind == "exact" or agreement.reads_lengths
        self._limits = limits
        self._most = (limits.max_num_reqs, limits.max_num_tokens, limits.max_seq_len)
        self._device_type = device.type
        self._pages = PageGuard(agreement, limits.num_blocks, device.type) if requested.paged else None
        # Without a cache, or without a decode phase, there are no decodes: a short sequence is a short prefill.
        self._threshold = requested.decode_query_len if requested.paged and "decode" in requested.phases else 0
        self._orders_keys = requested.attn_type != "encoder_decoder" and (
            bool(requested.paged) or bool(requested.causal)
        )

    def check(self, batch: Batch) -> BatchSplit:
        """
        Return the split, with the batch as plugins see it: exact numbers for bounds, and no padded requests.

        Raises:
            ContractError: The batch contradicts itself, the agreement or the limits; see `MetadataBuilder.build`.
        """
        return self._check(batch, in_place=False)[0]

    def check_for_graph(self, batch: Batch, *, in_place: bool) -> Checked:
        """
        Check a batch for a graph.

        Args:
            batch: The batch.
            in_place: Whether the graph reads the batch's own tensors: then all of them are kept, padding included.

        Raises:
            ContractError: As `check` says.
        """
        split, given, query_len = self._check(batch, in_place=in_place)
        return Checked(split, given if in_place else split.batch, query_len)

    def _check(self, batch: Batch, *, in_place: bool) -> tuple[BatchSplit, Batch, int | None]:
        """Return the split, the batch with the lengths that were read, and `Checked.query_len`."""
        self._check_counts(batch)
        given = batch = self.read(batch)
        if type(batch.num_padded_reqs) is not int or batch.num_padded_reqs:
            batch = without_padding(batch)
            if in_place:
                check_null_padding(given, self._agreement.block_size or 1)
        if batch.dummy and not in_place:
            batch = as_dummy(batch, self._agreement.block_size or 1)
        split, query_len = self._split(batch)
        if split.batch is not given and not in_place:
            note_sizes(split.batch, given)
            keep_lengths(split.batch, self._agreement)
        return split, given, query_len

    def read(self, batch: Batch) -> Batch:
        """
        Return the batch with the lengths that this agreement reads from the device, read once for all builders.

        Raises:
            BatchError: The host gave bounds, and a length is larger.
        """
        return with_lengths(batch, reads_queries=self._reads_queries) if self._reads_lengths else batch

    def with_exact_numbers(self, batch: Batch, *, longest: bool) -> Batch:
        """
        Return a batch that was not checked as plugins would see it: exact numbers for bounds, no padded requests.

        Args:
            batch: The batch.
            longest: Whether the longest sequence is needed too, where the CPU has exact lengths.

        Raises:
            ContractError: The number of padded requests is invalid, a row behind the last token has a slot, or a bound
                does not hold.
        """
        read = self.read(batch)
        seen = with_exact_counts(read)
        if longest and self._is_exact:
            seen = with_exact_longest(seen, longest_of(seen))
        return seen if seen is read else keep_lengths(seen, self._agreement)

    def _split(self, batch: Batch) -> tuple[BatchSplit, int | None]:
        batch, query_lens, query_len = self._check_queries(batch)
        batch, seq_lens, contexts = self._check_lengths(batch, query_lens)
        check_negotiated(batch, self._agreement, query_lens, self._device_type)
        num_decodes = self._num_decodes(batch, query_lens)
        num_decode_tokens = _tokens_of(batch, num_decodes)
        if self._pages is not None:
            rows, highest = self._pages.check(batch, query_lens, seq_lens, contexts)
        else:
            rows, highest = check_dense(batch, seq_lens, self._device_type, is_exact=self._is_exact), -1
        split = BatchSplit(
            batch=batch,
            num_decodes=num_decodes,
            num_prefills=batch.num_reqs - num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=batch.num_actual_tokens - num_decode_tokens,
            num_key_rows=rows,
            highest_block=highest,
        )
        return split, query_len

    def _check_counts(self, batch: Batch) -> None:
        counts = reqs, tokens, _, longest, _ = _counts_of(batch)
        most_reqs, most_tokens, most_keys = self._most
        if (
            {*map(type, counts)} == _INTS
            and 0 < reqs <= most_reqs
            and 0 < tokens <= most_tokens
            and longest <= most_keys
            and batch.max_encoder_seq_len is None
        ):
            return
        self._check_each_count(batch)

    def _check_each_count(self, batch: Batch) -> None:
        """The same, number by number."""
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

    def _check_queries(self, batch: Batch) -> tuple[Batch, Tensor, int | None]:
        """
        Return the batch with its exact number of tokens and longest query, the query lengths on the host, and
        `Checked.query_len`.
        """
        shape = (batch.num_reqs + 1,)
        check_index("query_start_loc", batch.query_start_loc, shape, torch.int32, self._device_type)
        host = check_mirror("query_start_loc", batch.query_start_loc, batch.query_start_loc_cpu)
        found = packed_query_lens(batch, host)
        if found is not None:
            tokens, lens = found
            return with_exact_queries(batch, tokens, batch.max_query_len), lens, batch.max_query_len
        starts: list[int] = host.tolist()
        lens = host.diff()
        low, high = extremes(lens)
        tokens = starts[-1]
        if starts[0] != 0 or low < 0 or not 0 < tokens <= batch.num_actual_tokens:
            _refuse_starts(batch, starts)
        if high > batch.max_query_len:
            raise BatchError(
                f"max_query_len={batch.max_query_len} was given",
                f"the longest query has {high} tokens, and max_query_len is at least that",
                f"pass max_query_len={high}",
            )
        if tokens != batch.num_actual_tokens or high != batch.max_query_len:
            batch = with_exact_queries(batch, tokens, high)
        return batch, lens, None

    def _check_lengths(self, batch: Batch, query_lens: Tensor) -> tuple[Batch, Tensor | None, Tensor | None]:
        """
        Return the batch with its longest sequence, the exact CPU sequence lengths, and how many tokens are before each
        query; None for these where the host does not know them, and for the last where no CPU copy is compared with it.
        """
        shape = (batch.num_reqs,)
        check_index("seq_lens", batch.seq_lens, shape, torch.int32, self._device_type)
        exact = self._is_exact
        if batch.seq_lens_cpu is None and not exact:
            _check_longest(batch, batch.max_query_len if self._orders_keys else 0)
            if batch.num_computed_tokens_cpu is not None:
                check_index("num_computed_tokens_cpu", batch.num_computed_tokens_cpu, shape, torch.int32, "cpu")
            return batch, None, None
        host = check_mirror("seq_lens", batch.seq_lens, batch.seq_lens_cpu, exact=exact)
        low, high = extremes(host)
        _check_longest(batch, high)
        # Where the shortest sequence is as long as the longest query, all are as long as their own.
        if low < 0 or (self._orders_keys and low < batch.max_query_len and int((host - query_lens).amin()) < 0):
            _refuse_short(host, query_lens)
        computed, contexts = batch.num_computed_tokens_cpu, None
        if computed is not None or batch.block_table_cpu is not None:
            contexts = host - query_lens
            if computed is not None:
                _check_computed(computed, contexts, exact=exact)
        if not exact:
            return batch, None, None
        return with_exact_longest(batch, high), host, contexts

    def _num_decodes(self, batch: Batch, query_lens: Tensor) -> int:
        """Return the number of decodes: the requests before the first longer query, which may be padded ones too."""
        threshold = self._threshold
        if batch.max_query_len > threshold and "prefill" not in self._requested.phases:
            raise NotNegotiatedError(
                f"a batch with a query of {batch.max_query_len} tokens was given",
                f"{self._agreement.id} was selected for decodes alone, of at most {threshold} tokens",
                f"select again with phases=('prefill', 'decode') or decode_query_len={batch.max_query_len}",
            )
        if threshold == 0:
            return 0
        if batch.max_query_len <= threshold and not self._uniform:
            return batch.num_reqs
        return count_decodes(query_lens.tolist(), threshold, uniform=self._uniform)


def _tokens_of(batch: Batch, num_decodes: int) -> int:
    """Return the query tokens of the requests at the front."""
    if num_decodes in (0, batch.num_reqs):
        return batch.num_actual_tokens if num_decodes else 0
    host = batch.query_start_loc_cpu
    assert host is not None  # noqa: S101 - _check_queries has seen it
    return int(host[num_decodes])


def _refuse_starts(batch: Batch, starts: list[int]) -> None:
    fall = next((index for index in range(batch.num_reqs) if starts[index + 1] < starts[index]), None)
    found = f"it starts at {starts[0]} and ends at {starts[-1]}"
    if fall is not None:
        found += f", and falls from {starts[fall]} to {starts[fall + 1]} at request {fall}"
    raise BatchError(
        f"a query_start_loc was given, and {found}",
        f"it starts at 0, never falls, and ends at 1 to num_actual_tokens={batch.num_actual_tokens}",
        "pass [0, *itertools.accumulate(query_lens)], or use Batch.from_lengths",
    )


def _check_longest(batch: Batch, longest: int) -> None:
    if batch.max_seq_len < longest:
        raise BatchError(
            f"max_seq_len={batch.max_seq_len} was given",
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
