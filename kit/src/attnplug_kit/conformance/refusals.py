"""What was not declared or not negotiated is refused, in words that name the field and the value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug import NoBackendError, select
from attnplug.contract import Layer
from attnplug.errors import ContractError, RequestError
from attnplug.manifest import Range
from attnplug.negotiation import Request
from attnplug.request import FIELDS, Flag, Integer, Name, Number, Requirements, fields_of
from attnplug_kit.conformance.field_values import Capability, field_values_of
from attnplug_kit.conformance.pairwise import refused_pairs
from attnplug_kit.conformance.require import require
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.conformance.serving import load_for, plain
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.oracle.scene import Paged, materialize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attnplug.manifest import Constraint, Rule
    from attnplug_kit.conformance.subject import Subject

_ODD: Final[dict[str, tuple[Any, ...]]] = {
    "head_size_v": (24,),
    "sliding_window": (7,),
    "attention_chunk": (16,),
    "logits_soft_cap": (30.0,),
    "block_sparse": ({"kit": 1},),
    "decode_query_len": (2, 64),
    "dcp_size": (2,),
    "features": (("kit.nobody_has_this",),),
}


def _refused(subject: Subject) -> dict[str, Any]:
    """Every field of the requirements with values that the subject does not declare, and a request for each."""
    found = {}
    for item in fields_of("model", "engine"):
        for value in _undeclared(item.name, subject.supports.get(item.name)):
            requirements = _request(subject, item.name, value)
            if requirements is not None:
                found[str(Capability(item.name, value))] = (item.name, value, requirements)
    return found


def _undeclared(name: str, constraint: Constraint | None) -> Iterator[Any]:
    item = FIELDS[name]
    if constraint is None and item.open:
        return
    for value in dict.fromkeys(_candidates(name, constraint)) if name != "block_sparse" else _ODD[name]:
        canonical = item.domain.canonical(value)
        if canonical != item.neutral and not (constraint is not None and constraint.allows(canonical)):
            yield value


def _candidates(name: str, constraint: Constraint | None) -> tuple[Any, ...]:
    domain = FIELDS[name].domain
    if constraint is not None and isinstance(domain, (Integer, Number)):
        return tuple(value for value in _around(constraint) if value >= 1)
    if isinstance(domain, Flag):
        return (True, False)
    if isinstance(domain, Name):
        return tuple(value for value in domain.values if value != "auto")
    return _ODD.get(name, ())


def _around(constraint: Constraint) -> Iterator[Any]:
    for part in constraint.alternatives:
        if not isinstance(part, Range):
            yield part.value + 1
            continue
        yield from (part.min - 1,) if part.min is not None else ()
        yield from (part.max + 1,) if part.max is not None else ()
        yield from ((part.min or part.multiple_of) + 1,) if part.multiple_of not in (None, 1) else ()


def _request(subject: Subject, name: str, value: Any) -> Requirements | None:
    """Return requirements that ask for a value beside what is plain, or None where the value contradicts that."""
    fields = plain(subject).fields
    fields["num_q_heads"] = fields["num_kv_heads"] * fields.pop("gqa_ratio")
    value = (*subject.features, *value) if name == "features" else value
    for paged in (fields.pop("paged"), True, False):
        asked = {**fields, "paged": paged, name: value}
        if not asked["paged"]:
            asked.pop("block_size", None)
        try:
            requirements = Requirements(**asked)
        except RequestError:
            continue
        if FIELDS[name].free or any(field == name for field, _ in requirements.requested()):
            return requirements
    return None


def _without_features(subject: Subject) -> dict[str, Any]:
    """For each rule that needs features, the first request of the menu that it is about, with the features left out."""
    found: dict[str, Any] = {}
    for rule in subject.rules_that_need_features if subject.features else ():
        for ask in field_values_of(subject).asks.values():
            requirements = ask.and_(features=None).requirements()
            if requirements is not None and _is_about(rule, requirements, subject):
                found[", ".join(map(str, rule.when))] = (requirements, rule)
                break
    return found


def _is_about(rule: Rule, requirements: Requirements, subject: Subject) -> bool:
    request = Request(requirements, subject.device)
    installed = subject.candidate.installed
    return all(one.holds(request.facts, request.requested_names, installed, absent=False) for one in rule.when)


class Refusals(Tier):
    """Every undeclared capability is asked for, and everything that was not negotiated is brought along."""

    @over(_refused)
    def test_undeclared_is_refused(self, subject: Subject, point: Any) -> None:
        """A value that the manifest does not declare is refused with a reason that names field and value."""
        name, value, requirements = point
        reasons = subject.objections(requirements)
        require(reasons, f"{subject}: {name}={value} is not declared, and was not refused")
        try:
            select(requirements, subject.device, backend=subject.id)
        except NoBackendError as error:
            text = str(error)
            require(name in text, f"{subject}: the refusal of {name}={value} does not name the field: {text}")
            shown = dict(value) if name == "block_sparse" else value
            named = str(shown) in text or all(str(part) in text for part in (shown if name == "features" else ()))
            require(
                named or name == "block_sparse", f"{subject}: the refusal of {name}={value} does not name the value"
            )
        else:
            raise AssertionError(f"{subject}: {name}={value} is not declared, and was selected")

    @over(_without_features)
    def test_request_without_features_is_refused(self, subject: Subject, point: Any) -> None:
        """A request that lacks the open features which a rule needs is refused, by that rule."""
        requirements, rule = point
        without = f"{subject}: a request without features={', '.join(subject.features)}"
        told = [reason.because for reason in subject.objections(requirements)]
        require(rule.because in told, f"{without} was not refused by the rule that needs them: {rule.because}")
        try:
            select(requirements, subject.device, backend=subject.id)
        except NoBackendError as error:
            require(
                "features" in str(error), f"{without} was refused, and the refusal does not name the field: {error}"
            )
        else:
            raise AssertionError(f"{without} was selected, and a rule needs them: {rule.because}")

    def test_refused_pairs_have_reasons(self, subject: Subject) -> None:
        """Two declared values that do not go together are refused by a rule that says why."""
        for ask in refused_pairs(subject):
            reasons = subject.objections(ask.requirements())  # type: ignore[arg-type]
            silent = [reason for reason in reasons if reason.code == "rule" and not reason.because]
            require(reasons and not silent, f"{subject}: {ask} is refused without a reason")

    @over(lambda subject: {name: name for name in _BROUGHT if not _is_served_plainly(subject, name)})
    def test_layer_brings_what_was_not_negotiated(self, subject: Subject, point: Any) -> None:
        """A layer with a feature that its agreement lacks is refused, and the refusal names it."""
        ask = plain(subject)
        scene = materialize(ask.case(71))
        backend = load_for(subject, ask, scene.case)
        heads = torch.ones(scene.case.num_q_heads, device=backend.device)
        layer = Layer(name="layer", **{point: _BROUGHT[point](heads)})
        _demand_refused(lambda: backend.make_impl(layer), point, f"{subject}: a layer with {point}")

    @needs(sinks=True)
    def test_layer_lacks_sinks(self, subject: Subject) -> None:
        """A layer without the sinks that were asked for is refused."""
        backend = subject.load(plain(subject, sinks=True).requirements())  # type: ignore[arg-type]
        _demand_refused(lambda: backend.make_impl(Layer(name="layer")), "sinks", f"{subject}: a layer without sinks")

    @over(lambda _: {name: name for name in _IN_A_BATCH})
    def test_batch_brings_what_was_not_negotiated(self, subject: Subject, point: Any) -> None:
        """A batch with a feature that its agreement lacks is refused, and the refusal names it."""
        ask = plain(subject)
        scene = materialize(ask.case(72))
        rig = Rig(load_for(subject, ask, scene.case), scene)
        batch = rig.call(scene).batch
        changed = evolve(batch, **{point: _IN_A_BATCH[point](batch.seq_lens)})
        _demand_refused(lambda: rig.builder.build(changed), point, f"{subject}: a batch with {point}")

    def test_lse_that_was_not_negotiated(self, subject: Subject) -> None:
        """An LSE is written only where it was asked for."""
        ask = plain(subject)
        scene = materialize(ask.case(73))
        rig = Rig(load_for(subject, ask, scene.case), scene)
        call = rig.call(scene)
        cache = call.cache if isinstance(call, Paged) else None
        metadata = rig.builder.build(call.batch)

        def forward() -> None:
            rig.impl.forward(call.query, call.key, call.value, cache, metadata, call.output, lse=call.lse)

        _demand_refused(forward, "lse", f"{subject}: a forward with an LSE")


_BROUGHT: Final[dict[str, Callable[[Tensor], Any]]] = {
    "sinks": lambda heads: heads,
    "alibi_slopes": lambda heads: heads,
    "sliding_window": lambda _: 5,
    "attention_chunk": lambda _: 16,
    "logits_soft_cap": lambda _: 5.0,
    "kv_sharing_target": lambda _: "another",
    "attn_type": lambda _: "encoder_only",
    "head_size": lambda _: 7,
    "num_q_heads": lambda _: 13,
    "block_sparse": lambda _: {"kit": 1},
    "output_scale": lambda heads: heads[:1],
    "extra": lambda _: {"kit.nobody_has_this": 1},
}
_IN_A_BATCH: Final[dict[str, Callable[[Tensor], Any]]] = {
    "causal": lambda _: False,
    "common_prefix_len": lambda _: 16,
    "custom_mask": lambda lens: torch.ones(8, dtype=torch.bool, device=lens.device),
    "encoder_seq_lens": lambda lens: lens,
    "dcp_local_seq_lens": lambda lens: lens,
    "extra": lambda _: {"kit.nobody_has_this": 1},
}


def _is_served_plainly(subject: Subject, name: str) -> bool:
    """Whether a plain ask has this already; none does but where a backend serves nothing without it."""
    return plain(subject).fields.get(name) is not None and name not in ("head_size", "num_q_heads")


def _demand_refused(call: Callable[[], object], name: str, what: str) -> None:
    try:
        call()
    except ContractError as error:
        require(name in str(error), f"{what} was refused, and the refusal does not name {name}: {error}")
    else:
        raise AssertionError(f"{what} was not negotiated, and was taken")
