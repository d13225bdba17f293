"""The block sizes and layouts that a candidate accepts, and the agreement that leaves the block size to be bound."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

from attrs import evolve

from attnplug.manifest.constraint import Alternative, Constraint, Exact, Range
from attnplug.negotiation.matching import Request, agree, judge_terms, live_rules
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.candidate import Candidate

CacheTerms = tuple["int | None", "str | None"]
"""A block size and a layout; None for both without a paged cache."""


def as_facts(terms: CacheTerms) -> Mapping[str, Any]:
    """Return terms under the names of their fields."""
    return {"block_size": terms[0], "kv_layout": terms[1]}


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
    return tuple(terms for terms in product(sizes, layouts) if not judge_terms(candidate, request, as_facts(terms)))


def agree_unbound(
    candidate: Candidate, request: Request, terms: Mapping[str, Any], common: Sequence[CacheTerms]
) -> Agreement:
    """
    Return the agreement with a candidate on a request with late fields.

    Args:
        candidate: A candidate that can serve the request.
        request: What is requested of it.
        terms: A block size and a layout that pass.
        common: The terms that all layers of a model accept; empty where they are not planned together.
    """
    agreed = agree(candidate, request, terms)
    if "block_size" not in request.requirements.late:
        return agreed
    declared = candidate.supports("block_size") or Constraint(FIELDS["block_size"].domain, (Range(min=1),))
    if not common and not live_rules(candidate, request):
        whole = (Range(min=1) if each == Range() else each for each in declared.alternatives)
        return evolve(agreed, block_size=None, block_sizes=Constraint(declared.domain, tuple(whole)))
    # A rule can refuse any block size, so the set is found by trial, and stated as far as it was tried.
    passing = common or passing_terms(candidate, request)
    first: dict[int | None, str | None] = {}
    for size, layout in passing:
        first.setdefault(size, layout)
    layouts = set(first.values())
    return evolve(
        agreed,
        block_size=None,
        kv_layout=layouts.pop() if len(layouts) == 1 else None,
        block_sizes=restrict(declared, lambda size: size in first),
    )


def restrict(constraint: Constraint, passes: Callable[[int], bool], limit: int = 1024) -> Constraint:
    """
    Return the whole numbers of a constraint that pass, in its order of preference.

    Args:
        constraint: Which numbers are considered; of ranges only those up to `limit`.
        passes: Decides one.
        limit: The largest number of a range that is tried.
    """
    found: list[Alternative] = []
    for alternative in constraint.alternatives:
        if isinstance(alternative, Exact):
            found += [alternative] if passes(alternative.value) else []
        else:
            found += _runs(constraint, alternative, passes, limit)
    return Constraint(constraint.domain, tuple(dict.fromkeys(found)))


def _runs(
    constraint: Constraint, alternative: Range, passes: Callable[[int], bool], limit: int
) -> Iterator[Alternative]:
    """Yield runs of neighboring numbers of a range that pass: three or more as a range again."""
    run: list[int] = []
    for number in (*sorted(Constraint(constraint.domain, (alternative,)).members(limit)), None):
        if number is not None and passes(number):
            run.append(number)
            continue
        if len(run) > 2:
            yield Range(run[0], run[-1], alternative.multiple_of)
        else:
            yield from map(Exact, run)
        run = []


def _members(candidate: Candidate, name: str) -> tuple[Any, ...]:
    constraint = candidate.supports(name)
    return constraint.members() if constraint is not None else ()
