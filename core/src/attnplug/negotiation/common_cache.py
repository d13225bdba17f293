"""One block size, one layout and one form of the KV cache for all layers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.negotiation.candidate import CACHE_TERMS
from attnplug.negotiation.matching import passing_terms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.negotiation.matching import CacheTerms


def share_terms(ranked: Sequence[Sequence[Evaluation]]) -> list[Evaluation] | None:
    """
    Pick an evaluation for each request so that all paged ones share one block size, one layout and one form.

    Candidates are tried in their ranked order, the first request first (give the one with most layers first): a later
    request yields before an earlier one.

    Args:
        ranked: For each request, the evaluations of the candidates that can serve it, best first.

    Returns:
        An evaluation for each request, with the shared terms, or None where no choice shares any.
    """
    picked = _search(ranked, None)
    if picked is None:
        return None
    evaluations, shared = picked
    paged = [each for each in evaluations if each.request.requirements.paged]
    if not all("block_size" in each.request.requirements.late for each in paged):
        shared = shared[:1] if shared else shared  # one layer's block size is settled now, and holds for the late ones
    # The first of the shared terms is the one that the first request, with most layers, prefers.
    return [each.with_cache_terms(shared[0], shared) if shared and each in paged else each for each in evaluations]


def _search(
    ranked: Sequence[Sequence[Evaluation]], shared: tuple[CacheTerms, ...] | None
) -> tuple[list[Evaluation], tuple[CacheTerms, ...] | None] | None:
    """
    Search depth first: the first evaluation of the first request that leaves terms with which the rest can be served.

    Args:
        ranked: The requests that are left.
        shared: The terms that all picked so far accept; None before the first with a paged cache.
    """
    if not ranked:
        return [], shared
    for evaluation in ranked[0]:
        narrowed = _narrow(evaluation, shared)
        if narrowed is not None and len(narrowed) == 0:
            continue
        rest = _search(ranked[1:], narrowed)
        if rest is not None:
            return [evaluation, *rest[0]], rest[1]
    return None


def _narrow(evaluation: Evaluation, shared: tuple[CacheTerms, ...] | None) -> tuple[CacheTerms, ...] | None:
    """Return the terms that this evaluation accepts too."""
    if not evaluation.request.requirements.paged:
        return shared
    passing = passing_terms(evaluation.candidate, evaluation.request, evaluation.terms or {})
    agreements = (each.agreement for each in evaluation.candidate.refusals or ())
    doubtful = {tuple(getattr(each, name) for name in CACHE_TERMS) for each in agreements if each is not None}
    accepted = tuple(
        terms for terms in passing if terms not in doubtful or evaluation.with_cache_terms(terms).refusal is None
    )
    if shared is None:
        return accepted
    common = set(accepted)
    return tuple(terms for terms in shared if terms in common)
