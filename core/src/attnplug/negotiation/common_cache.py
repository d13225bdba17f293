"""One block size and one layout for all layers of a model."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING, Any

from attnplug.negotiation.evaluation import Question, judge_terms

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from attnplug.negotiation.candidate import Candidate

Terms = tuple["int | None", "str | None"]
Refused = Callable[["Candidate", Question], "Collection[Terms]"]


def _nothing_refused(candidate: Candidate, question: Question) -> Collection[Terms]:
    del candidate, question
    return ()


def passing_terms(candidate: Candidate, question: Question) -> tuple[Terms, ...]:
    """
    Return every (block size, layout) that a candidate accepts for a question that it can serve, most preferred first.

    Block sizes beyond 1024 tokens are considered only where the manifest names them.
    """
    asked = question.requirements
    if not asked.paged:
        return ()
    sizes = (asked.block_size,) if asked.block_size is not None else _members(candidate, "block_size")
    layouts = (asked.kv_layout,) if asked.kv_layout is not None else _members(candidate, "kv_layout")
    return tuple(terms for terms in product(sizes, layouts) if not judge_terms(candidate, question, as_facts(terms)))


def share_terms(
    entries: Sequence[tuple[Question, Sequence[Candidate]]], refused: Refused = _nothing_refused
) -> list[tuple[Candidate, Mapping[str, Any]]] | None:
    """
    Pick a candidate for each question so that all paged ones share one block size and one layout.

    Candidates are tried in their ranked order, the first question first (give the one with most layers first): a
    later question yields before an earlier one.

    Args:
        entries: Each question with the candidates that can serve it, best first.
        refused: Returns the terms that a candidate must not be given for a question, whatever its manifest says.

    Returns:
        A candidate and the terms for each question, or None where no choice shares any terms.
    """
    picked = _search(entries, None, refused)
    if picked is None:
        return None
    candidates, shared = picked
    terms = as_facts(shared[0]) if shared else as_facts((None, None))
    nothing = as_facts((None, None))
    return [
        (candidate, terms if question.requirements.paged else nothing)
        for candidate, (question, _) in zip(candidates, entries, strict=True)
    ]


def as_facts(terms: Terms) -> Mapping[str, Any]:
    """Return terms under the names of their fields."""
    return {"block_size": terms[0], "kv_layout": terms[1]}


def _search(
    entries: Sequence[tuple[Question, Sequence[Candidate]]], shared: tuple[Terms, ...] | None, refused: Refused
) -> tuple[list[Candidate], tuple[Terms, ...] | None] | None:
    if not entries:
        return [], shared
    question, candidates = entries[0]
    for candidate in candidates:
        narrowed = _narrow(candidate, question, shared, refused)
        if narrowed is not None and len(narrowed) == 0:
            continue
        rest = _search(entries[1:], narrowed, refused)
        if rest is not None:
            return [candidate, *rest[0]], rest[1]
    return None


def _narrow(
    candidate: Candidate, question: Question, shared: tuple[Terms, ...] | None, refused: Refused
) -> tuple[Terms, ...] | None:
    """Return the terms that are still common, None while no layer with a paged cache has been seen."""
    if not question.requirements.paged:
        return shared
    without = refused(candidate, question)
    ours = tuple(terms for terms in passing_terms(candidate, question) if terms not in without)
    return ours if shared is None else tuple(terms for terms in shared if terms in set(ours))


def _members(candidate: Candidate, name: str) -> tuple[Any, ...]:
    constraint = candidate.supports(name)
    return constraint.members() if constraint is not None else ()
