"""
One candidate against one question.

The order of work: asked fields against declared ones, rules about them, then the free fields (block size, layout) in
declared order until the remaining rules
pass. All objections are collected; nothing stops at the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from attnplug.manifest.schema import IsAsked
from attnplug.negotiation.candidate import FREE, Candidate
from attnplug.negotiation.verdict import Reason
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.manifest.schema import Condition, Rule
    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements

_NO_TERMS: Mapping[str, Any] = {"block_size": None, "kv_layout": None}


@frozen(eq=False)
class Question:
    """
    Requirements on a device, laid out for asking many candidates.

    Attributes:
        requirements: What is asked.
        device: Where it shall run.
        facts: Every field with its value.
        asked: The (field, value) pairs that a candidate has to declare. The phases are always among them: both are what
            everyone serves who declares none, and who declares one serves that one.
        names: The names of those that ask for something.
        asked_terms: Those of the free fields that are not left open.
        origins: Where values come from that whoever asks has not stated, by field: a setting, say.
    """

    requirements: Requirements
    device: Device
    facts: dict[str, Any] = field(init=False)
    asked: tuple[tuple[str, Any], ...] = field(init=False)
    names: frozenset[str] = field(init=False)
    asked_terms: tuple[tuple[str, Any], ...] = field(init=False)
    origins: Mapping[str, str] = field(factory=dict, kw_only=True)

    def __attrs_post_init__(self) -> None:
        device = self.device.facts()
        put = object.__setattr__
        put(self, "facts", {**self.requirements.facts(), **device})
        asked = (*self.requirements.asked(), *(fact for fact in device.items() if fact[1] is not None))
        put(self, "names", frozenset(name for name, _ in asked))
        put(self, "asked", asked if "phases" in self.names else (*asked, ("phases", self.requirements.phases)))
        terms = ((name, self.facts[name]) for name in ("block_size", "kv_layout"))
        put(self, "asked_terms", tuple(term for term in terms if term[1] is not None))


@frozen
class Outcome:
    """
    What one candidate answers.

    Attributes:
        objections: Everything against it; empty if it can serve.
        terms: The settled free fields, if it can serve.
    """

    objections: tuple[Reason, ...]
    terms: Mapping[str, Any] = field(factory=dict, hash=False)


def negotiate(candidate: Candidate, question: Question) -> Outcome:
    """Ask one candidate. What is installed plays no part here but for rules about installed versions."""
    objections = candidate.objections(question.asked)
    for rule in candidate.fixed_rules:
        _apply(rule, candidate, question, question.facts, objections)
    terms, objection = _settle(candidate, question)
    return Outcome((*objections, *objection), terms)


def graph_level(candidate: Candidate, question: Question) -> str:
    """Return the highest CUDA graph level that a candidate, able to serve the question, supports for it."""
    for level in candidate.graph_levels:
        if not candidate.rules_graphs or _serves_level(candidate, question, level):
            return level
    return question.requirements.cudagraph


def _serves_level(candidate: Candidate, question: Question, level: str) -> bool:
    return not negotiate(candidate, Question(question.requirements.evolve(cudagraph=level), question.device)).objections


def _apply(
    rule: Rule, candidate: Candidate, question: Question, facts: dict[str, Any], objections: list[Reason]
) -> None:
    for condition in rule.when:
        if not condition.holds(facts, question.names, candidate.installed, absent=False):
            return
    if not rule.need:
        objections.append(_refusal(rule, facts))
    objections.extend(
        Reason("rule", condition.field, _plain(condition, facts), _needed(condition, facts), rule.because)
        for condition in rule.need
        if not condition.holds(facts, question.names, candidate.installed, absent=True)
    )


def _needed(condition: Condition, facts: dict[str, Any]) -> str:
    """Say what a rule needs. A field that asks for nothing may have a value all the same, such as a dtype."""
    asks_for_nothing = isinstance(condition, IsAsked) and condition.asked and facts[condition.field]
    return f"another {condition.field}" if asks_for_nothing else str(condition)


def _refusal(rule: Rule, facts: dict[str, Any]) -> Reason:
    fields = " and ".join(condition.field for condition in rule.when)
    wanted = [_plain(condition, facts) for condition in rule.when]
    return Reason("rule", fields, wanted[0] if len(wanted) == 1 else tuple(wanted), "", rule.because)


def _plain(condition: Condition, facts: dict[str, Any]) -> Any:
    value = facts.get(condition.field)
    if condition.field not in FIELDS:
        return str(condition)
    return None if value is None else FIELDS[condition.field].domain.dump(value)


def _settle(candidate: Candidate, question: Question) -> tuple[Mapping[str, Any], list[Reason]]:
    """Return the first terms that pass, or the objections to the first ones."""
    rules = _live_rules(candidate, question)
    if not rules:  # then the first terms pass if any do: nothing but what was asked for stands against them
        objections = candidate.objections(question.asked_terms)
        return ({} if objections else next(_all_terms(candidate, question))), objections
    first: list[Reason] | None = None
    for terms in _all_terms(candidate, question):
        objections = _judge(candidate, question, terms, rules)
        if not objections:
            return terms, []
        first = objections if first is None else first
    return {}, first or []


def judge_terms(candidate: Candidate, question: Question, terms: Mapping[str, Any]) -> list[Reason]:
    """
    Return the objections of a candidate to settled terms: a block size and a layout, or None for both without a paged
    cache.
    """
    return _judge(candidate, question, terms, _live_rules(candidate, question))


def _judge(candidate: Candidate, question: Question, terms: Mapping[str, Any], rules: Sequence[Rule]) -> list[Reason]:
    objections = candidate.objections(term for term in terms.items() if term[1] is not None)
    if rules:
        facts = {**question.facts, **terms}
        for rule in rules:
            _apply(rule, candidate, question, facts, objections)
    return objections


def _live_rules(candidate: Candidate, question: Question) -> list[Rule]:
    """Return the rules about free fields that some terms can bring to bear: whose other conditions hold."""
    return [rule for rule in candidate.free_rules if _is_live(rule, candidate, question)]


def _is_live(rule: Rule, candidate: Candidate, question: Question) -> bool:
    for condition in rule.when:
        if condition.field not in FREE and not condition.holds(
            question.facts, question.names, candidate.installed, absent=False
        ):
            return False
    return True


def _all_terms(candidate: Candidate, question: Question) -> Iterator[Mapping[str, Any]]:
    """Yield terms in declared order."""
    asked = question.requirements
    if not asked.paged:
        yield _NO_TERMS
        return
    sizes = candidate.choices("block_size") if asked.block_size is None else (asked.block_size,)
    layouts = candidate.choices("kv_layout") if asked.kv_layout is None else (asked.kv_layout,)
    for size in sizes or (None,):
        for layout in layouts or (None,):
            yield {"block_size": size, "kv_layout": layout}
