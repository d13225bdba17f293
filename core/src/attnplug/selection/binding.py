"""Binding: the fields that a decision left open get their values, and its candidate alone is judged with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve

from attnplug.errors import NotNegotiatedError, RequirementsError
from attnplug.manifest.constraint import Constraint, Range
from attnplug.negotiation.candidate import CACHE_TERMS
from attnplug.negotiation.common_cache import share_terms
from attnplug.negotiation.evaluation import Evaluation, evaluate
from attnplug.negotiation.matching import Request
from attnplug.negotiation.pair import PairEvaluation, evaluate_pairs
from attnplug.request.fields import FIELDS
from attnplug.request.settings import Settings
from attnplug.selection.load import same_candidate
from attnplug.selection.process import current_state

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.selection.selection import Selection

_MOST_HEADS = 256
"""Head counts up to this one are tried to say which would do."""


def bind_selection(selection: Selection, values: Mapping[str, int | None]) -> Selection:
    """
    Bind the late fields of one decision; see `Selection.bind`.

    Args:
        selection: The decision.
        values: A value for each field, None for those that stay late.
    """
    given = _given(values, selection.late)
    if not given:
        return selection
    return _rebound(selection, _evaluate_bound(selection, given))


def bind_selections(selections: Sequence[Selection], values: Mapping[str, int | None]) -> list[Selection]:
    """Bind the late fields of the decisions for one model, whose layers share a block size; see `Plan.bind`."""
    given = _given(values, tuple({name for selection in selections for name in selection.late}))
    if not given:
        return list(selections)
    evaluations = [_evaluate_bound(selection, given) for selection in selections]
    picks = share_terms([[evaluation] for evaluation in evaluations])
    if picks is None:
        raise _nothing_common(selections, evaluations, given)
    return [
        _rebound(selection, pick) if selection.late else selection
        for selection, pick in zip(selections, picks, strict=True)
    ]


def _given(values: Mapping[str, int | None], late: tuple[str, ...]) -> dict[str, int]:
    """Return the values that are bound now; refuses one of a field that is not late."""
    given = {name: value for name, value in values.items() if value is not None}
    for name, value in given.items():
        if name not in late:
            raise RequirementsError(
                f"{name}={value!r} was to be bound",
                f"late={late}: only what the requirements name there is left to bind",
                f"leave {name} out, or select with {name!r} in late",
            )
    return given


def _evaluate_bound(selection: Selection, given: Mapping[str, int]) -> Evaluation:
    """
    Evaluate the candidate of a decision with the values that are bound in it; its own terms where nothing is.

    Raises:
        NotNegotiatedError: The candidate refuses them.
    """
    if selection.roles:
        decode, rest = (_evaluate_bound(one, given) for one in selection.roles.values())
        pair = evaluate_pairs(rest.request, [decode], [rest])
        if not pair.serves:
            raise _refused(selection, pair, given)
        return pair
    candidate = same_candidate(selection)[1]
    if candidate.availability == "missing_dependency":
        candidate = candidate.if_installed  # the decision has supposed it; loading still needs it
    own = {name: value for name, value in given.items() if name in selection.late}
    wanted, agreed = selection.requirements, selection.agreement
    if not wanted.late:  # a decision among late ones holds them to its terms
        completed = wanted.evolve(**{name: getattr(agreed, name) for name in CACHE_TERMS})
    else:
        completed = wanted.evolve(**own, late=[name for name in wanted.late if name not in own])
    settings = Settings(options={selection.backend: dict(agreed.options)} if agreed.options else {})
    request = Request(completed, selection.device, settings)
    evaluation = evaluate(candidate, request, current_state().evidence)
    if not evaluation.serves:
        raise _refused(selection, evaluation, own or given)
    return evaluation


def _rebound(selection: Selection, evaluation: Evaluation) -> Selection:
    """Return a decision on the agreement of an evaluation. The verdicts on the others are those of the selection."""
    agreement = evaluation.agreement
    if agreement is None:  # an evaluation that serves has one
        raise AssertionError
    of_roles = evaluation.verdicts() if isinstance(evaluation, PairEvaluation) else ()
    chosen = (evaluation.verdict(chosen=True), *of_roles)
    ids = [verdict.id for verdict in chosen]
    others = (verdict for verdict in selection.verdicts if verdict.id not in ids)
    return evolve(selection, agreement=agreement, verdicts=(*chosen, *others))


def _refused(selection: Selection, evaluation: Evaluation, own: Mapping[str, int]) -> NotNegotiatedError:
    bound = ", ".join(f"{name}={value}" for name, value in own.items())
    reasons = "; ".join(map(str, evaluation.reasons))
    others = list(_others(evaluation, own))
    return NotNegotiatedError(
        f"{selection.id!r} was to be bound to {bound}",
        reasons,
        " or ".join([*(f"bind {other}" for other in others), "select again with these values, for another backend"]),
    )


def _others(evaluation: Evaluation, own: Mapping[str, int]) -> Iterator[str]:
    """Yield, for each field that is bound, the values that would do beside the others, if any would."""
    candidate, request = evaluation.candidate, evaluation.request

    def passes(name: str, value: int) -> bool:
        try:
            other = request.requirements.evolve(**{name: value})
        except RequirementsError:
            return False  # query heads that are no multiple of the KV heads
        changed = Request(other, request.device, request.settings)
        return evaluate(candidate, changed).serves

    for name in own:
        domain = FIELDS[name].domain
        declared = candidate.supports(name) or Constraint(domain, (Range(min=1),))
        limit = 1024 if name == "block_size" else _MOST_HEADS
        found = declared.restrict(lambda value, name=name: passes(name, value), limit)  # type: ignore[misc]
        if found.alternatives:
            yield f"{name} to one of: {found}"


def _nothing_common(
    selections: Sequence[Selection], evaluations: Sequence[Evaluation], given: Mapping[str, Any]
) -> NotNegotiatedError:
    bound = ", ".join(f"{name}={value}" for name, value in given.items())
    terms = {
        f"{each.id}: {', '.join(f'{name}={getattr(e.request.requirements, name)}' for name in CACHE_TERMS)}"
        for each, e in zip(selections, evaluations, strict=True)
        if e.request.requirements.paged
    }
    sizes = next((s.agreement.block_sizes for s in selections if s.agreement.block_sizes is not None), None)
    return NotNegotiatedError(
        f"the layers of a plan were to be bound to {bound}",
        f"no layout and form serve all groups with one block size ({'; '.join(sorted(terms))})",
        f"bind a block size that all of them serve: {sizes}" if sizes is not None else "plan again with these values",
    )
