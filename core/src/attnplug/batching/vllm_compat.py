"""Where the decodes of a batch end and its prefills begin."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from attrs import frozen

from attnplug.errors import BatchError, LayerError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, MutableSequence, Sequence

    from attnplug.contract.impl import AttentionImpl
    from attnplug.contract.inputs.batch import Batch


class Split(NamedTuple):
    """
    Requests and query tokens on either side of the split.

    Attributes:
        num_decodes: Requests at the front.
        num_prefills: The requests after them, padded ones included.
        num_decode_tokens: Query tokens of the decodes: the first rows.
        num_prefill_tokens: Query tokens of the prefills: the rows after them.
    """

    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int


def split_decodes_and_prefills(batch: Batch, decode_threshold: int = 1, *, require_uniform: bool = False) -> Split:
    """
    Split a batch that is ordered decodes first. Reads the host copy alone.

    A padded request (query length 0) sides with whatever stands before it.

    Args:
        batch: The batch.
        decode_threshold: The longest query that still counts as a decode.
        require_uniform: Count as decodes only the requests at the front whose query is as long as the first one's, for
            kernels and graphs that take one query length.

    Raises:
        BatchError: A decode stands behind a prefill, the host copy is missing, or the threshold is below 1.
    """
    if decode_threshold < 1:
        raise BatchError(
            f"decode_threshold={decode_threshold} was given",
            "a decode has at least one query token",
            "pass the agreed decode_query_len",
        )
    lengths = _query_lens(batch)
    num_decodes = _leading(lengths, decode_threshold, require_uniform=require_uniform)
    if not require_uniform:
        _refuse_disorder(lengths, num_decodes, decode_threshold)
    tokens = sum(lengths[:num_decodes])
    return Split(num_decodes, len(lengths) - num_decodes, tokens, sum(lengths) - tokens)


def _query_lens(batch: Batch) -> list[int]:
    if batch.query_start_loc_cpu is None:
        raise BatchError(
            "the batch has no query_start_loc_cpu",
            "the split is made from the host's lengths, so that no build waits for the device",
            "give query_start_loc_cpu, or make the batch with Batch.from_lengths",
        )
    starts = batch.query_start_loc_cpu.tolist()
    return [end - start for start, end in pairwise(starts)]


def _leading(lengths: Sequence[int], threshold: int, *, require_uniform: bool) -> int:
    first = lengths[0] if lengths else 0
    for index, length in enumerate(lengths):
        if length > threshold or (require_uniform and length not in (first, 0)):
            return index
    return len(lengths)


def _refuse_disorder(lengths: Sequence[int], num_decodes: int, threshold: int) -> None:
    for index, length in enumerate(lengths[num_decodes:], num_decodes):
        if 0 < length <= threshold:
            raise BatchError(
                f"request {index} has {length} query tokens and stands behind request {num_decodes}, which has "
                f"{lengths[num_decodes]}",
                f"requests of at most {threshold} query tokens (decodes) come first in every batch",
                "order the batch with reorder_batch_to_split_decodes_and_prefills",
            )


_R = TypeVar("_R", bound="Hashable")
_T = TypeVar("_T")


@frozen
class Reordering(Generic[_R]):
    """
    A new order of a batch's requests.

    Attributes:
        order: The requests, decodes first.
        swaps: Pairs of positions to exchange, to get there from the old order. No position is in two of them.
    """

    order: tuple[_R, ...]
    swaps: tuple[tuple[int, int], ...]

    @property
    def changed(self) -> bool:
        """Whether the order differs from the one before."""
        return bool(self.swaps)

    def apply(self, state: MutableSequence[_T]) -> None:
        """Permute a host's per-request state in place, the way the requests were permuted."""
        for front, back in self.swaps:
            state[front], state[back] = state[back], state[front]


def reorder_batch_to_split_decodes_and_prefills(
    order: Sequence[_R], scheduled_tokens: Mapping[_R, int], decode_threshold: int = 1
) -> Reordering[_R]:
    """
    Put every request with at most `decode_threshold` scheduled tokens first.

    One swap per misplaced decode is the least that can do it: a swap brings at most one of them to the front.

    Args:
        order: The requests as they stand, each once.
        scheduled_tokens: New tokens of each request in this step.
        decode_threshold: The most tokens that still count as a decode.

    Raises:
        BatchError: A request has no entry in `scheduled_tokens`.
    """
    missing = [request for request in order if request not in scheduled_tokens]
    if missing:
        raise BatchError(
            f"no scheduled tokens were given for {missing!r}",
            "every request of the order has a number of scheduled tokens",
            "add these requests to scheduled_tokens, with 0 for requests that pause",
        )
    is_decode = [scheduled_tokens[request] <= decode_threshold for request in order]
    num_decodes = sum(is_decode)
    in_front = [i for i in range(num_decodes) if not is_decode[i]]
    behind = [i for i in range(num_decodes, len(order)) if is_decode[i]]
    swaps = tuple(zip(in_front, behind, strict=True))
    result = list(order)
    Reordering((), swaps).apply(result)
    return Reordering(tuple(result), swaps)


class Hyperparameters(NamedTuple):
    """
    What a plan of one layer is made for.

    Attributes:
        window_left: Tokens attended to the left of a token's own; -1 for all.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``; None for no cap.
        sm_scale: Factor of the scores.
    """

    window_left: int
    logits_soft_cap: float | None
    sm_scale: float


def per_layer_parameters(impls: Iterable[AttentionImpl]) -> dict[str, Hyperparameters]:
    """
    Return the values of each layer, by its name.

    Raises:
        LayerError: Two layers have one name.
    """
    found: dict[str, Hyperparameters] = {}
    for impl in impls:
        name = impl.layer.name
        if name in found:
            raise LayerError(
                f"two layers are called {name!r}",
                "each layer of a model has a name of its own",
                "name them after their place in the model: 'layers.0.attention', ...",
            )
        found[name] = Hyperparameters(impl.window[0], impl.logits_soft_cap, impl.scale)
    return found


def infer_global_hyperparameters(per_layer: Mapping[str, Hyperparameters]) -> Hyperparameters:
    """
    Return the values that all layers share, for a library that plans once for all of them.

    Args:
        per_layer: What `per_layer_parameters` returned; plain tuples of that order do too.

    Raises:
        LayerError: There are no layers, or some differ; it names them.
    """
    if not per_layer:
        raise LayerError("no layers were given", "the shared values are those of at least one layer", "pass the impls")
    (first, shared), *_ = per_layer.items()
    differing = {name: values for name, values in per_layer.items() if tuple(values) != tuple(shared)}
    if differing:
        listed = ", ".join(f"{name!r} has {_words(values)}" for name, values in differing.items())
        raise LayerError(
            f"{first!r} has {_words(shared)}; {listed}",
            "one plan for all layers needs one window, one soft cap and one scale",
            "plan per group of equal values: MetadataBuilder keeps one plan for each plan_key",
        )
    return Hyperparameters(*shared)


def _words(values: tuple[int, float | None, float]) -> str:
    return ", ".join(f"{name}={value}" for name, value in zip(Hyperparameters._fields, values, strict=True))
