"""One block size, one layout and one form of the KV cache for all layers of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.negotiation.cache_terms import CacheTerms, as_facts, passing_terms
from attnplug.negotiation.evaluation import find_refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.negotiation.matching import Request


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
    terms = as_facts(shared[0] if shared else (None, None, None))
    return [each.with_terms(terms, shared or ()) if each in paged else each for each in evaluations]


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
    refused = _refused_terms(evaluation.candidate, evaluation.request)
    passing = passing_terms(evaluation.candidate, evaluation.request)
    accepted = tuple(terms for terms in passing if terms not in refused)
    if shared is None:
        return accepted
    common = set(accepted)
    return tuple(terms for terms in shared if terms in common)


def _refused_terms(candidate: Candidate, request: Request) -> frozenset[CacheTerms]:
    """Return the terms of those agreements on a request that the candidate's probe has refused."""
    refused = (each.agreement for each in candidate.refusals or ())
    found = {
        (agreement.block_size, agreement.kv_layout, agreement.kv_cache_form)
        for agreement in refused
        if agreement is not None
    }
    return frozenset(terms for terms in found if find_refusal(candidate, request, as_facts(terms)) is not None)
