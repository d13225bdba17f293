"""The split of a batch into decodes and prefills, and each of the two as kernels take it that serve one phase."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from attrs import field, fields, frozen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch


@frozen(eq=False, kw_only=True)
class BatchSplit:
    """
    A checked batch, split into decodes and prefills.

    Attributes:
        batch: The batch.
        num_decodes: Requests at the front whose query is at most the agreed decode query length; with
            `MetadataBuilder.requires_uniform_decodes`, those of them that are as long as the first.
        num_prefills: The other requests: all from the first longer query on, short ones and padding included.
        num_decode_tokens: Query tokens of the decodes: the first rows.
        num_prefill_tokens: Query tokens of the prefills: the rows after them.
        num_key_rows: K/V rows that a call of `forward` has at least; 0 for dense calls whose keys only the device
            counts.
        highest_block: An upper bound of the block numbers that this step touches; -1 where no CPU copy has them.
    """

    batch: Batch = field(repr=lambda batch: f"<{batch.num_reqs} requests, {batch.num_actual_tokens} tokens>")
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_key_rows: int
    highest_block: int = -1

    @property
    def decodes(self) -> Phase | None:
        """The decodes, None where there are none. In a graph of decodes, all requests."""
        return phase_of(self.batch, 0, self.num_decodes, 0, self.num_decode_tokens)

    @property
    def prefills(self) -> Phase | None:
        """The prefills, with their query rows counted from 0; None where there are none."""
        return phase_of(
            self.batch, self.num_decodes, self.num_prefills, self.num_decode_tokens, self.num_prefill_tokens
        )


@frozen(eq=False)
class Phase:
    """
    A run of requests. Tensors are views of the batch's, but for starts that have to be counted from 0 again.

    Attributes:
        first_req: The first request.
        num_reqs: Requests.
        first_token: The first query row.
        num_tokens: Query rows.
        max_query_len: The longest query of the phase.
        max_seq_len: The longest sequence of the phase; the batch's bound where the host's lengths are not exact.
        query_start_loc: ``(num_reqs + 1,)`` int32, from 0.
        query_start_loc_cpu: CPU copy.
        seq_lens: ``(num_reqs,)``.
        seq_lens_cpu: CPU copy, as exact as the batch's.
        block_table: ``(num_reqs, max_blocks)``, None for dense calls.
        encoder_seq_lens: ``(num_reqs,)``, for paged cross attention.
        encoder_seq_lens_cpu: CPU copy.
        max_encoder_seq_len: The longest encoder of the batch.
        dcp_local_seq_lens: ``(num_reqs,)``, for decode context parallelism.
        dcp_local_seq_lens_cpu: CPU copy.
    """

    first_req: int
    num_reqs: int
    first_token: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor | None
    block_table: Tensor | None
    encoder_seq_lens: Tensor | None
    encoder_seq_lens_cpu: Tensor | None
    max_encoder_seq_len: int | None
    dcp_local_seq_lens: Tensor | None
    dcp_local_seq_lens_cpu: Tensor | None

    @property
    def rows(self) -> slice:
        """The query rows of the phase, in query, output and LSE."""
        return slice(self.first_token, self.first_token + self.num_tokens)


def phase_of(batch: Batch, first_req: int, num_reqs: int, first_token: int, num_tokens: int) -> Phase | None:
    """
    Return the phase of these requests, made once for the batch; None where they have no query.

    Args:
        batch: A checked batch.
        first_req: The first request.
        num_reqs: Requests.
        first_token: The first query row.
        num_tokens: Query rows.
    """
    if not num_tokens:
        return None
    derived, key = batch.derived, ("phase", first_req, num_reqs)
    found: Phase | None = derived.get(key)
    if found is None:
        found = derived[key] = _phase(batch, first_req, num_reqs, first_token, num_tokens)
    return found


def _phase(batch: Batch, first_req: int, num_reqs: int, first_token: int, num_tokens: int) -> Phase:
    if num_reqs == batch.num_reqs:
        # A batch of one phase keeps its own tensors and numbers: in a graph these are bounds, and frozen.
        return Phase(first_req, num_reqs, first_token, num_tokens, *_whole_of(batch))
    host = batch.query_start_loc_cpu
    assert host is not None  # noqa: S101 - the guard has seen it
    requests, starts = slice(first_req, first_req + num_reqs), slice(first_req, first_req + num_reqs + 1)
    rebased = host[starts] - first_token if first_token else host[starts]
    lens = batch.seq_lens_cpu
    is_exact = lens is not None and int(lens.amax()) == batch.max_seq_len
    return Phase(
        first_req=first_req,
        num_reqs=num_reqs,
        first_token=first_token,
        num_tokens=num_tokens,
        max_query_len=int(rebased.diff().amax()),
        max_seq_len=int(lens[requests].amax()) if is_exact and lens is not None else batch.max_seq_len,
        query_start_loc=batch.query_start_loc[starts] - first_token if first_token else batch.query_start_loc[starts],
        query_start_loc_cpu=rebased,
        max_encoder_seq_len=batch.max_encoder_seq_len,
        **{name: _cut(getattr(batch, name), requests) for name in _PER_REQUEST},
    )


def _cut(tensor: Tensor | None, requests: slice) -> Any:
    return None if tensor is None else tensor[requests]


_PER_REQUEST = (
    "seq_lens",
    "seq_lens_cpu",
    "block_table",
    "encoder_seq_lens",
    "encoder_seq_lens_cpu",
    "dcp_local_seq_lens",
    "dcp_local_seq_lens_cpu",
)


_whole_of: Final = attrgetter(*[each.name for each in fields(Phase)[4:]])


# --- machinery ---


def count_decodes(query_lens: Sequence[int], threshold: int, *, uniform: bool) -> int:
    """
    Return how many requests at the front are decodes. Padded requests (query length 0) between them count too.

    Args:
        query_lens: New tokens of each request.
        threshold: The longest query of a decode.
        uniform: Whether decodes have the first one's query length; padding ends them then.
    """
    first = query_lens[0]
    for index, length in enumerate(query_lens):
        if length > threshold or (uniform and not 0 < length == first):
            return index
    return len(query_lens)
