"""One block size, one layout and one form of the KV cache for all layers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.negotiation.matching import CacheTerms

TRIES: Final = 10_000
"""Evaluations at most that are tried for a place in one plan. A model of ten groups and fifty candidates needs 500."""


def share_terms(ranked: Sequence[Sequence[Evaluation]]) -> list[Evaluation] | None:
    """
    Pick an evaluation for each request so that all paged ones share one block size, one layout and one form.

    Candidates are tried in their ranked order, the first request first (give the one with most layers first): a later
    request yields before an earlier one.

    Args:
        ranked: For each request, the evaluations of the candidates that can serve it, best first.

    Returns:
        An evaluation for each request, with the shared terms, or None where no choice shares any, or none was found
        in `TRIES`.
    """
    picked = _search(ranked)
    if picked is None:
        return None
    return settle_terms(*picked)


def settle_terms(evaluations: Sequence[Evaluation], shared: tuple[CacheTerms, ...] | None) -> list[Evaluation]:
    """
    Return evaluations with the shared terms.

    Args:
        evaluations: An evaluation for each request.
        shared: The terms that all paged ones accept, the preferred first; None or empty where none is paged.
    """
    paged = [each for each in evaluations if each.request.requirements.paged]
    if not all("block_size" in each.request.requirements.late for each in paged):
        shared = shared[:1] if shared else shared  # one layer's block size is settled now, and holds for the late ones
    # The first of the shared terms is the one that the first request, with most layers, prefers.
    return [each.with_cache_terms(shared[0], shared) if shared and each in paged else each for each in evaluations]


def _search(
    ranked: Sequence[Sequence[Evaluation]],
) -> tuple[list[Evaluation], tuple[CacheTerms, ...] | None] | None:
    """
    Search depth first: the first evaluation of the first request that leaves terms with which the rest can be served.

    Returns:
        The evaluations and the terms that all of them accept; None for these where none has a paged cache.
    """
    accepted: dict[Evaluation, tuple[CacheTerms, ...]] = {}
    failed: set[tuple[int, tuple[CacheTerms, ...] | None]] = set()
    picked: list[Evaluation] = []
    places: list[tuple[tuple[CacheTerms, ...] | None, Iterator[Evaluation]]] = [(None, iter(ranked[0]))]
    for _ in range(TRIES):
        shared, left = places[-1]
        evaluation = next(left, None)
        if evaluation is None:
            failed.add((len(picked), shared))
            places.pop()
            if not picked:
                return None
            picked.pop()
            continue
        narrowed = _narrow(evaluation, shared, accepted)
        if narrowed == () or (len(places), narrowed) in failed:
            continue
        picked.append(evaluation)
        if len(picked) == len(ranked):
            return picked, narrowed
        places.append((narrowed, iter(ranked[len(picked)])))
    return None


def _narrow(
    evaluation: Evaluation,
    shared: tuple[CacheTerms, ...] | None,
    known: dict[Evaluation, tuple[CacheTerms, ...]],
) -> tuple[CacheTerms, ...] | None:
    """Return the terms that this evaluation accepts too."""
    if not evaluation.request.requirements.paged:
        return shared
    if evaluation not in known:
        known[evaluation] = evaluation.accepted_terms()
    if shared is None:
        return known[evaluation]
    common = set(known[evaluation])
    return tuple(terms for terms in shared if terms in common)
