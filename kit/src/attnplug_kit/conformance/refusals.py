"""What was not declared or not negotiated is refused, in a message that names the field and the value."""

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
from attnplug_kit.conformance.serving import plain, require, runner_for
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.fields import ROWS
from attnplug_kit.oracle import Paged, materialize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attnplug.manifest import Constraint, Rule
    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.subject import Subject


def _refused(subject: Subject) -> dict[str, Any]:
    """Return undeclared values of every field of the requirements, and a request for each."""
    found = {}
    for item in fields_of("model", "engine"):
        if item.name == "seq_lens_cpu_kind":
            continue  # what is not declared is served by reading the lengths from the device
        for value in _undeclared(item.name, subject.supports.get(item.name)):
            requirements = _request(subject, item.name, value)
            if requirements is None or not subject.decides(requirements):
                continue
            if not (requirements.latent and item.name == "kv_cache_form"):  # it follows
                found[str(Capability(item.name, value))] = (item.name, value, requirements)
    return found


def _undeclared(name: str, constraint: Constraint | None) -> Iterator[Any]:
    item = FIELDS[name]
    if constraint is None and item.open:
        return
    for value in dict.fromkeys(_candidates(name, constraint)) if name != "block_sparse" else ROWS[name].odd:
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
    return ROWS[name].odd


def _around(constraint: Constraint) -> Iterator[Any]:
    for part in constraint.alternatives:
        if not isinstance(part, Range):
            yield part.value + 1
            continue
        yield from (part.min - 1,) if part.min is not None else ()
        yield from (part.max + 1,) if part.max is not None else ()
        yield from ((part.min or part.multiple_of) + 1,) if part.multiple_of not in (None, 1) else ()


def _request(subject: Subject, name: str, value: Any) -> Requirements | None:
    """Return plain requirements with a value, or None where the value contradicts them."""
    latents = field_values_of(subject).spec(latent=True) if name == "topk" else None
    fields = (latents or plain(subject)).fields
    fields["num_q_heads"] = fields["num_kv_heads"] * fields.pop("gqa_ratio")
    value = (*subject.features, *value) if name == "features" else value
    for paged in (fields.pop("paged"), True, False):
        own = {**fields, "paged": paged, name: value}
        if not own["paged"]:
            own.pop("block_size", None)
        try:
            requirements = Requirements(**own)
        except RequestError:
            continue
        if FIELDS[name].free or any(field == name for field, _ in requirements.requested()):
            return requirements
    return None


def _without_features(subject: Subject) -> dict[str, Any]:
    """Return for each rule that needs features the first request that it applies to, without the features."""
    found: dict[str, Any] = {}
    for rule in subject.rules_that_need_features if subject.features else ():
        for spec in field_values_of(subject).specs.values():
            requirements = spec.evolve(features=None).requirements()
            if requirements is not None and subject.decides(requirements) and _applies(rule, requirements, subject):
                found[", ".join(map(str, rule.when))] = (requirements, rule)
                break
    return found


def _applies(rule: Rule, requirements: Requirements, subject: Subject) -> bool:
    request = Request(requirements, subject.device)
    installed = subject.candidate.installed
    return all(one.holds(request.facts, request.requested_names, installed, absent=False) for one in rule.when)


def _of_a_layer(subject: Subject) -> dict[str, str]:
    """Return what a layer may have beyond its agreement, as far as plain requests are without it."""
    odd = [name for name, row in ROWS.items() if FIELDS[name].in_layer and row.odd]
    return {name: name for name in (*odd, *_OF_A_LAYER) if not _is_in_plain_requests(subject, name)}


class Refusals(Tier):
    """Requests for undeclared values, and layers and batches with features that were not negotiated."""

    @over(_refused)
    def test_undeclared_is_refused(self, subject: Subject, point: Any) -> None:
        """A value that the manifest does not declare is refused, by a reason that names field and value."""
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
            named = named or name == "block_sparse"
            require(named, f"{subject}: the refusal of {name}={value} does not name the value")
        else:
            raise AssertionError(f"{subject}: {name}={value} is not declared, and was selected")

    @over(_without_features)
    def test_request_without_features_is_refused(self, subject: Subject, point: Any) -> None:
        """A request without the open features that a rule needs is refused, by that rule."""
        requirements, rule = point
        without = f"{subject}: a request without features={', '.join(subject.features)}"
        reasons = [reason.because for reason in subject.objections(requirements)]
        require(rule.because in reasons, f"{without} was not refused by the rule that needs them: {rule.because}")
        try:
            select(requirements, subject.device, backend=subject.id)
        except NoBackendError as error:
            named = "features" in str(error)
            require(named, f"{without} was refused, and the refusal does not name the field: {error}")
        else:
            raise AssertionError(f"{without} was selected, and a rule needs them: {rule.because}")

    def test_refused_pairs_have_reasons(self, subject: Subject) -> None:
        """Two declared values that are incompatible are refused by a rule with a reason."""
        for spec in refused_pairs(subject):
            reasons = subject.objections(spec.requirements())  # type: ignore[arg-type]
            silent = [reason for reason in reasons if reason.code == "rule" and not reason.because]
            require(reasons and not silent, f"{subject}: {spec} is refused without a reason")

    @over(_of_a_layer)
    def test_layer_feature_not_negotiated(self, subject: Subject, draw: Draw, point: Any) -> None:
        """A layer with a feature that is not in its agreement is refused, and the refusal names it."""
        spec = draw(plain(subject))
        case = spec.case(71)
        backend = subject.load(case.requirements(**spec.engine))
        heads = torch.ones(case.num_q_heads, device=backend.device)
        value = _OF_A_LAYER[point](heads) if point in _OF_A_LAYER else ROWS[point].odd[0]
        layer = Layer(name="layer", **{point: value})
        _require_refused(lambda: backend.make_impl(layer), point, f"{subject}: a layer with {point}")

    @needs(sinks=True)
    def test_layer_without_sinks(self, subject: Subject) -> None:
        """A layer without the sinks that were requested is refused."""
        backend = subject.load(plain(subject, sinks=True).requirements())  # type: ignore[arg-type]
        _require_refused(lambda: backend.make_impl(Layer(name="layer")), "sinks", f"{subject}: a layer without sinks")

    @over(lambda _: {name: name for name in _OF_A_BATCH})
    def test_batch_feature_not_negotiated(self, subject: Subject, draw: Draw, point: Any) -> None:
        """A batch with a feature that is not in its agreement is refused, and the refusal names it."""
        spec = draw(plain(subject))
        scene = materialize(spec.case(72))
        runner = runner_for(subject, spec, scene)
        batch = runner.call(scene).batch
        changed = evolve(batch, **{point: _OF_A_BATCH[point](batch.seq_lens)})
        _require_refused(lambda: runner.builder.build(changed), point, f"{subject}: a batch with {point}")

    def test_lse_not_negotiated(self, subject: Subject, draw: Draw) -> None:
        """A tensor for the LSE is refused if the LSE was not requested."""
        spec = draw(plain(subject), keep=("return_lse",))
        scene = materialize(spec.case(73))
        runner = runner_for(subject, spec, scene)
        call = runner.call(scene)
        cache = call.cache if isinstance(call, Paged) else None
        metadata = runner.builder.build(call.batch)

        def forward() -> None:
            runner.impl.forward(call.query, call.key, call.value, cache, metadata, call.output, lse=call.lse)

        _require_refused(forward, "lse", f"{subject}: a forward with an LSE")


_OF_A_LAYER: Final[dict[str, Callable[[Tensor], Any]]] = {
    "sinks": lambda heads: heads,
    "alibi_slopes": lambda heads: heads,
    "kv_sharing_target": lambda _: "another",
    "output_scale": lambda heads: heads[:1],
    "extra": lambda _: {"kit.nobody_has_this": 1},
}
_OF_A_BATCH: Final[dict[str, Callable[[Tensor], Any]]] = {
    "causal": lambda _: False,
    "common_prefix_len": lambda _: 16,
    "custom_mask": lambda lens: torch.ones(8, dtype=torch.bool, device=lens.device),
    "attn_bias": lambda lens: torch.zeros(1, 8, device=lens.device),
    "mm_prefix_range": lambda lens: lens.new_full((8, 2), -1),
    "encoder_seq_lens": lambda lens: lens,
    "dcp_local_seq_lens": lambda lens: lens,
    "extra": lambda _: {"kit.nobody_has_this": 1},
}


def _is_in_plain_requests(subject: Subject, name: str) -> bool:
    """Whether a plain request has this already, since the backend serves nothing without it."""
    return plain(subject).fields.get(name) is not None and name not in ("head_size", "num_q_heads")


def _require_refused(call: Callable[[], object], name: str, what: str) -> None:
    try:
        call()
    except ContractError as error:
        require(name in str(error), f"{what} was refused, and the refusal does not name {name}: {error}")
    else:
        raise AssertionError(f"{what} was not negotiated, and was accepted")
