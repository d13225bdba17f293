"""Checks a batch against itself, the agreement and the limits, from CPU copies: it never waits for a device."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from attnplug.contract.guards._format import check_index, check_mirror, extremes, refuse_unrequested
from attnplug.contract.guards.layer import check_extra
from attnplug.contract.guards.pages import PageGuard, check_encoder, check_local
from attnplug.contract.inputs.batch import Batch
from attnplug.contract.inputs.kv_cache import TORCH_DTYPES
from attnplug.contract.inputs.phase import BatchSplit, count_decodes, uniform_query_lens
from attnplug.errors import BatchError, NotNegotiatedError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.limits import Limits
    from attnplug.negotiation.agreement import Agreement
    from attnplug.request.requirements import Requirements

_COUNTS = ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "common_prefix_len")


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


class BatchGuard:
    """Checks the batches of one builder."""

    def __init__(
        self, agreement: Agreement, limits: Limits, device: torch.device, *, requires_uniform_decodes: bool = False
    ) -> None:
        requested = agreement.requirements
        self._agreement = agreement
        self._requested = requested
        self._uniform = requires_uniform_decodes
        self._limits = limits
        self._device_type = device.type
        self._pages = PageGuard(agreement, limits.num_blocks, device.type) if requested.paged else None
        # Without a cache, or without a decode phase, there are no decodes: a short sequence is a short prefill.
        self._threshold = requested.decode_query_len if requested.paged and "decode" in requested.phases else 0
        self._orders_keys = requested.attn_type != "encoder_decoder" and (
            bool(requested.paged) or bool(requested.causal)
        )

    def check(self, batch: Batch) -> BatchSplit:
        """
        Return the batch's split.

        Raises:
            ContractError: The batch contradicts itself, the agreement or the limits; see `MetadataBuilder.build`.
        """
        self._check_counts(batch)
        query_lens = self._check_queries(batch)
        seq_lens = self._check_lengths(batch, query_lens)
        _check_negotiated(batch, self._agreement, query_lens, self._device_type)
        num_decodes = self._num_decodes(batch, query_lens)
        num_decode_tokens = _tokens_of(batch, num_decodes)
        if self._pages is not None:
            rows, highest = self._pages.check(batch, query_lens, seq_lens)
        else:
            rows, highest = _check_dense(batch, seq_lens, self._device_type), -1
        return BatchSplit(
            batch=batch,
            num_decodes=num_decodes,
            num_prefills=batch.num_reqs - num_decodes,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=batch.num_actual_tokens - num_decode_tokens,
            num_key_rows=rows,
            highest_block=highest,
        )

    def _check_counts(self, batch: Batch) -> None:
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

    def _check_queries(self, batch: Batch) -> Tensor:
        """Return the query lengths on the host."""
        shape = (batch.num_reqs + 1,)
        check_index("query_start_loc", batch.query_start_loc, shape, torch.int32, self._device_type)
        host = check_mirror("query_start_loc", batch.query_start_loc, batch.query_start_loc_cpu)
        uniform = uniform_query_lens(batch)
        if uniform is not None:
            return uniform
        starts: list[int] = host.tolist()
        lens = host.diff()
        low, high = extremes(lens)
        if starts[0] != 0 or low < 0 or starts[-1] != batch.num_actual_tokens:
            _refuse_starts(batch, starts)
        if high != batch.max_query_len:
            raise BatchError(
                f"max_query_len={batch.max_query_len} was given",
                f"the longest query has {high} tokens",
                f"pass max_query_len={high}",
            )
        return lens

    def _check_lengths(self, batch: Batch, query_lens: Tensor) -> Tensor | None:
        """Return the exact CPU sequence lengths; None where the host has no exact ones."""
        shape = (batch.num_reqs,)
        check_index("seq_lens", batch.seq_lens, shape, torch.int32, self._device_type)
        exact = self._requested.seq_lens_cpu_kind == "exact"
        if batch.seq_lens_cpu is None and not exact:
            _check_longest(batch, batch.max_query_len if self._orders_keys else 0, exact=False)
            if batch.num_computed_tokens_cpu is not None:
                check_index("num_computed_tokens_cpu", batch.num_computed_tokens_cpu, shape, torch.int32, "cpu")
            return None
        host = check_mirror("seq_lens", batch.seq_lens, batch.seq_lens_cpu, exact=exact)
        low, high = extremes(host)
        _check_longest(batch, high, exact=exact)
        # Where the shortest sequence is as long as the longest query, all are as long as their own.
        if low < 0 or (self._orders_keys and low < batch.max_query_len and int((host - query_lens).amin()) < 0):
            _refuse_short(host, query_lens)
        if batch.num_computed_tokens_cpu is not None:
            _check_computed(batch.num_computed_tokens_cpu, host - query_lens, exact=exact)
        return host if exact else None

    def _num_decodes(self, batch: Batch, query_lens: Tensor) -> int:
        """Return the number of decodes; they come first, and padded requests may be anywhere."""
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
        lens: list[int] = query_lens.tolist()
        first = count_decodes(lens, threshold, uniform=False)
        for index in range(first, len(lens)):
            if 0 < lens[index] <= threshold:
                raise BatchError(
                    f"request {index} is a decode of {lens[index]} tokens behind the prefill of request {first}",
                    f"decodes (queries of at most {threshold} tokens) come first in every batch",
                    "reorder with attnplug.batching.reorder_batch_to_split_decodes_and_prefills",
                )
        return count_decodes(lens, threshold, uniform=True) if self._uniform else first


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
        f"it starts at 0, never falls, and ends at num_actual_tokens={batch.num_actual_tokens}",
        "pass [0, *itertools.accumulate(query_lens)], or use Batch.from_lengths",
    )


def _check_longest(batch: Batch, longest: int, *, exact: bool) -> None:
    if batch.max_seq_len == longest or (batch.max_seq_len > longest and not exact):
        return
    raise BatchError(
        f"max_seq_len={batch.max_seq_len} was given",
        f"the longest sequence has {longest} tokens" + ("" if exact else ", and max_seq_len is at least that"),
        f"pass max_seq_len={longest}"
        + ("; an upper bound needs seq_lens_cpu_kind='upper_bound' in the requirements" if exact else " or more"),
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


def _check_negotiated(batch: Batch, agreement: Agreement, query_lens: Tensor, device_type: str) -> None:
    """Check that the batch has what was requested beyond lengths and pages, and nothing else."""
    requested = agreement.requirements
    if batch.causal is not requested.causal:
        refuse_unrequested(
            f"a batch with causal={batch.causal!r}",
            f"causal={requested.causal} was negotiated",
            f"causal={batch.causal}",
        )
    if batch.common_prefix_len:
        _check_prefix(batch, agreement, query_lens)
    if batch.encoder_seq_lens is not None or requested.attn_type == "encoder_decoder":
        check_encoder(batch, agreement, device_type)
    if batch.dcp_local_seq_lens is not None or requested.dcp_size > 1:
        check_local(batch, agreement, device_type)
    _refuse_unread(batch, requested)
    if batch.custom_mask is not None or requested.custom_mask:
        _check_mask(batch, agreement, query_lens, device_type)
    if batch.attn_bias is not None or requested.attn_bias:
        _check_bias(batch, agreement, query_lens, device_type)
    if batch.extra:
        check_extra("a batch", batch.extra, agreement)


def _refuse_unread(batch: Batch, requested: Requirements) -> None:
    """Refuse what the host said about a tensor that the batch does not have: nothing reads it."""
    if batch.encoder_seq_lens is None:
        found = "max_encoder_seq_len" if batch.max_encoder_seq_len is not None else "encoder_seq_lens_cpu"
        if getattr(batch, found) is not None:
            refuse_unrequested(
                f"a batch with {found} and no encoder_seq_lens",
                f"attn_type={requested.attn_type!r}, paged={requested.paged} was negotiated; "
                "only paged cross attention has encoder lengths",
                "attn_type='encoder_decoder' and paged=True",
            )
    if batch.dcp_local_seq_lens is None and batch.dcp_local_seq_lens_cpu is not None:
        refuse_unrequested("a batch with dcp_local_seq_lens_cpu", "dcp_size=1 was negotiated", "dcp_size=...")
    if requested.paged:
        if batch.key_start_loc is None and batch.key_start_loc_cpu is not None:
            refuse_unrequested(
                "a batch with key_start_loc_cpu",
                "paged=True was negotiated: keys are found through the block table",
                "paged=False",
            )
        return
    for name in ("block_table_cpu", "slot_mapping_cpu"):
        if getattr(batch, name) is not None and getattr(batch, name.removesuffix("_cpu")) is None:
            refuse_unrequested(
                f"a batch with {name}",
                "paged=False was negotiated: each call gets contiguous (non-paged) K/V",
                "paged=True",
            )


def _check_prefix(batch: Batch, agreement: Agreement, query_lens: Tensor) -> None:
    length, size = batch.common_prefix_len, agreement.block_size
    if not agreement.requirements.cascade or size is None:
        refuse_unrequested(f"a batch with common_prefix_len={length}", "cascade was not requested", "cascade=True")
    if length < 0 or length % size:
        raise BatchError(
            f"common_prefix_len={length} was given",
            f"it is a multiple of the block size {size}",
            f"pass {max(0, length // size * size)}",
        )
    running = query_lens > 0  # padded requests attend to nothing
    _check_prefix_blocks(batch, running, length // size)
    _check_prefix_is_computed(batch, running, query_lens)


def _check_prefix_blocks(batch: Batch, running: Tensor, blocks: int) -> None:
    table = batch.block_table_cpu
    if table is None or not table.is_cpu or table.ndim != 2 or table.shape[0] != batch.num_reqs:
        return  # of another form, which the guard of pages refuses
    table = table[running, :blocks]
    if not bool((table == table[:1]).all()):
        raise BatchError(
            f"common_prefix_len={batch.common_prefix_len} was given, and the first {blocks} blocks differ",
            "a shared prefix is in the same blocks for every request",
            "pass the length that is really shared, or 0",
        )


def _check_prefix_is_computed(batch: Batch, running: Tensor, query_lens: Tensor) -> None:
    computed = batch.num_computed_tokens_cpu
    if computed is None:
        if batch.seq_lens_cpu is None:
            return
        computed = batch.seq_lens_cpu - query_lens
    shortest = int(computed[running].amin())
    if batch.common_prefix_len > shortest:
        raise BatchError(
            f"common_prefix_len={batch.common_prefix_len} was given",
            f"a request has {shortest} tokens computed, and every query of the batch attends to the whole prefix",
            "pass at most that, cut to whole blocks",
        )


def _check_mask(batch: Batch, agreement: Agreement, query_lens: Tensor, device_type: str) -> None:
    if not agreement.requirements.custom_mask:
        refuse_unrequested("a batch with a custom_mask", "custom_mask was not requested", "custom_mask=True")
    if batch.custom_mask is None:
        raise BatchError(
            "no custom_mask was given", "custom_mask was negotiated: each batch has its mask", "pass custom_mask=..."
        )
    size = batch.custom_mask.numel()
    if batch.seq_lens_cpu is not None and agreement.requirements.seq_lens_cpu_kind == "exact":
        size = int((batch.seq_lens_cpu.long() * query_lens.long()).sum())
    check_index("custom_mask", batch.custom_mask, (size,), torch.bool, device_type)


def _check_bias(batch: Batch, agreement: Agreement, query_lens: Tensor, device_type: str) -> None:
    requested, bias = agreement.requirements, batch.attn_bias
    if not requested.attn_bias:
        refuse_unrequested("a batch with an attn_bias", "attn_bias was not requested", "attn_bias=True")
    if bias is None:
        raise BatchError(
            "no attn_bias was given", "attn_bias was negotiated: each batch has its bias", "pass attn_bias=..."
        )
    size = bias.shape[-1] if bias.ndim else 0
    if batch.seq_lens_cpu is not None and requested.seq_lens_cpu_kind == "exact":
        size = int((batch.seq_lens_cpu.long() * query_lens.long()).sum())
    heads = 1 if bias.ndim and bias.shape[0] == 1 else requested.num_q_heads
    check_index("attn_bias", bias, (heads, size), TORCH_DTYPES[requested.dtype], device_type)


def _check_dense(batch: Batch, seq_lens: Tensor | None, device_type: str) -> int:
    """
    Return the number of K/V rows of a call.

    Raises:
        BatchError: key_start_loc is absent or contradicts the lengths.
        NotNegotiatedError: The batch has pages.
        TensorError: key_start_loc has the wrong shape, dtype or device.
    """
    for name in ("block_table", "slot_mapping"):
        if getattr(batch, name) is not None:
            raise NotNegotiatedError(
                f"a batch with a {name} was given",
                "paged=False was negotiated: each call gets contiguous (non-paged) K/V",
                f"select again with paged=True, or leave {name} out of the batch",
            )
    if batch.key_start_loc is None:
        raise BatchError(
            "a dense batch without key_start_loc was given",
            "key_start_loc says where each request's K/V rows start",
            "pass key_start_loc=query_start_loc where keys are as long as queries, or use Batch.from_lengths",
        )
    check_index("key_start_loc", batch.key_start_loc, (batch.num_reqs + 1,), torch.int32, device_type)
    host = check_mirror("key_start_loc", batch.key_start_loc, batch.key_start_loc_cpu)
    starts: list[int] = host.tolist()
    lens = host.diff()
    if starts[0] != 0 or int(lens.amin()) < 0 or (seq_lens is not None and not torch.equal(lens, seq_lens)):
        raise BatchError(
            "a key_start_loc was given that contradicts seq_lens",
            "it starts at 0, never falls, and its steps are seq_lens",
            "pass [0, *itertools.accumulate(seq_lens)], or use Batch.from_lengths",
        )
    return starts[-1]
