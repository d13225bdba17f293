"""The block sizes, layouts and forms that a candidate accepts, and agreements whose block size is left to be bound."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug.manifest.constraint import Alternative, Constraint, Exact, Range
from attnplug.negotiation.candidate import TERMS, mentions
from attnplug.negotiation.matching import Request, agree, judge_terms, live_rules
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.candidate import Candidate

CacheTerms = tuple["int | None", "str | None", "str | None"]
"""A block size, a layout and a form; None for all without a paged cache."""


_FORM: Final = frozenset({"kv_cache_form"})


def as_facts(terms: CacheTerms) -> Mapping[str, Any]:
    """Return terms under the names of their fields."""
    return dict(zip(TERMS, terms, strict=True))


def passing_terms(candidate: Candidate, request: Request) -> tuple[CacheTerms, ...]:
    """
    Return every (block size, layout, form) that a candidate accepts for a request that it can serve, best first.

    Block sizes beyond 1024 tokens are considered only where the manifest names them.
    """
    wanted = request.requirements
    if not wanted.paged:
        return ()
    known = ((name, getattr(wanted, name)) for name in TERMS)
    sizes, layouts, forms = (_members(candidate, name) if value is None else (value,) for name, value in known)
    if any(mentions(rule, _FORM) for rule in live_rules(candidate, request)):
        found = product(sizes, layouts, forms)
        return tuple(terms for terms in found if not judge_terms(candidate, request, as_facts(terms)))
    # No rule tells forms apart: the first of those that are declared is judged for all.
    allowed = [form for form in forms if not candidate.objections((("kv_cache_form", form),))]
    pairs = (
        pair
        for pair in product(sizes, layouts)
        if allowed and not judge_terms(candidate, request, as_facts((*pair, allowed[0])))
    )
    return tuple((*pair, form) for pair in pairs for form in allowed)


def agree_unbound(
    candidate: Candidate, request: Request, terms: Mapping[str, Any], common: Sequence[CacheTerms]
) -> Agreement:
    """
    Return the agreement with a candidate on a request with late fields.

    Args:
        candidate: A candidate that can serve the request.
        request: What is requested of it.
        terms: A block size, a layout and a form that pass.
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
    first: dict[int | None, tuple[str | None, str | None]] = {}
    for size, layout, form in passing:
        first.setdefault(size, (layout, form))
    layouts, forms = (set(values) for values in zip(*first.values(), strict=True))
    return evolve(
        agreed,
        block_size=None,
        kv_layout=layouts.pop() if len(layouts) == 1 else None,
        kv_cache_form=forms.pop() if len(forms) == 1 else None,
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
