"""One block size and one KV-cache layout for all layers of a model."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from attnplug.negotiation.evaluation import find_refusal
from attnplug.negotiation.matching import Request, judge_terms

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.evaluation import Evaluation

CacheTerms = tuple["int | None", "str | None"]
"""A block size and a layout; None for both without a paged cache."""


def passing_terms(candidate: Candidate, request: Request) -> tuple[CacheTerms, ...]:
    """
    Return every (block size, layout) that a candidate accepts for a request that it can serve, most preferred first.

    Block sizes beyond 1024 tokens are considered only where the manifest names them.
    """
    wanted = request.requirements
    if not wanted.paged:
        return ()
    sizes = (wanted.block_size,) if wanted.block_size is not None else _members(candidate, "block_size")
    layouts = (wanted.kv_layout,) if wanted.kv_layout is not None else _members(candidate, "kv_layout")
    return tuple(terms for terms in product(sizes, layouts) if not judge_terms(candidate, request, _as_facts(terms)))


def share_terms(ranked: Sequence[Sequence[Evaluation]]) -> list[Evaluation] | None:
    """
    Pick an evaluation for each request so that all paged ones share one block size and one layout.

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
    # The first of the shared terms is the one that the first request, with most layers, prefers.
    terms = _as_facts(shared[0] if shared else (None, None))
    return [each.with_terms(terms) if each.request.requirements.paged else each for each in evaluations]


def _as_facts(terms: CacheTerms) -> Mapping[str, Any]:
    """Return terms under the names of their fields."""
    return {"block_size": terms[0], "kv_layout": terms[1]}


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
    terms = {(agreement.block_size, agreement.kv_layout) for agreement in refused if agreement is not None}
    return frozenset(pair for pair in terms if find_refusal(candidate, request, _as_facts(pair)) is not None)


def _members(candidate: Candidate, name: str) -> tuple[Any, ...]:
    constraint = candidate.supports(name)
    return constraint.members() if constraint is not None else ()
