"""Other ways to compute the same attention: chunked prefill, advanced steps, fast builds, and cascade attention."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.serving import plain, runner_for
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.fields import CUTS, tested
from attnplug_kit.oracle import materialize
from attnplug_kit.oracle.running import limits_of, step_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.contract import KVCache, Metadata
    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Case, Paged, Scene, SceneRunner

_CHUNKS: Final = (16, 1, 9, 19)
"""New tokens of a prompt in each step of chunked prefill; decodes have one in each."""

_ORDERS: Final = (("decode", "prefill"), ("prefill", "decode"), ("decode", "prefill", "decode"))

_STEPS: Final = 4

_LONG_PREFIX: Final = "a prefix of more than 512 keys"
_CASCADES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "soft cap": {"logits_soft_cap": 2.0},
    "sinks and LSE": {"sinks": True, "return_lse": True},
    _LONG_PREFIX: {},
}


def _features(subject: Subject) -> Mapping[str, RequestSpec]:
    specs = field_values_of(subject).of(*tested("steps"))
    return {name: spec for name, spec in specs.items() if spec.fields.get("paged")}


def _decodes(subject: Subject) -> dict[str, RequestSpec]:
    """Return requests for decodes: plain ones, with bounds on lengths, and one for each value of a feature."""
    declared = field_values_of(subject)
    features = {str(item): {item.field: item.value} for item in declared.specs if item.field in tested("steps")}
    bounds = {"seq_lens_cpu_kind=upper_bound": {"seq_lens_cpu_kind": "upper_bound"}}
    found = {
        name: declared.spec(paged=True, phases=("decode",), **fields)
        for name, fields in {"plain": {}, **bounds, **features}.items()
    }
    return {name: spec for name, spec in found.items() if spec is not None}


def _cut_decodes(subject: Subject) -> dict[str, RequestSpec]:
    """Return the plain one of these requests, and those that hide keys."""
    return {name: spec for name, spec in _decodes(subject).items() if name.startswith(("plain", *CUTS))}


def _cascades(subject: Subject) -> dict[str, tuple[str, RequestSpec]]:
    found = {name: field_values_of(subject).spec(cascade=True, **fields) for name, fields in _CASCADES.items()}
    return {name: (name, spec) for name, spec in found.items() if spec is not None}


class Stepping(Tier):
    """Steps that build on each other, and steps with a shared prefix, give the result of one plain step."""

    @over(_features)
    def test_chunked_equals_one_shot(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Chunked prefill, with decodes before and behind it, gives what a prefill of the whole prompt gives."""
        spec = draw(point)
        order = _order(spec)
        first = max(30, spec.fields["block_size"] - 2)  # which a later step continues in another block
        lens = {"decode": (len(_CHUNKS), first), "prefill": (sum(_CHUNKS), 0)}
        query_lens, context_lens = zip(*(lens[kind] for kind in order), strict=True)
        whole = materialize(spec.case(81, query_lens=query_lens, context_lens=context_lens))
        starts = {"decode": range(first, first + len(_CHUNKS) + 1), "prefill": (0, *accumulate(_CHUNKS))}
        steps = zip(*(pairwise(starts[kind]) for kind in order), strict=True)
        runner, cache = _with_cache(subject, spec, whole)
        for number, spans in enumerate(steps, 1):
            step = step_of(whole, spans)
            call = _call(runner, step, cache)
            runner.forward(call, runner.builder.build(call.batch))
            what = f"{subject} with {spec}: {', '.join(order)} in step {number} of a chunked prefill"
            runner.compare(call, step, what)

    @over(_decodes)
    def test_advance_step(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Metadata of advanced steps decodes the next tokens, and that of the steps before stays the same."""
        spec = draw(point)
        whole, steps = decoded(spec)
        runner, cache = _with_cache(subject, spec, whole)
        calls = [_call(runner, step, cache) for step in steps]
        built = [runner.builder.build(calls[0].batch)]
        for _ in steps[1:]:
            built.append(runner.builder.advance_step(built[-1]))
        for number, (call, step, metadata) in enumerate(zip(calls, steps, built, strict=True), 1):
            _run(runner, call, step, metadata, f"{subject} with {spec}: step {number} of an advanced batch")

    @over(_cut_decodes)
    def test_advance_with_fewer_requests(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Of an advanced batch, the first requests may go on alone: the others are padding."""
        spec = draw(point)
        whole, steps = decoded(spec)
        runner, cache = _with_cache(subject, spec, whole)
        first = _call(runner, steps[0], cache)
        metadata = runner.builder.build(first.batch)
        _run(runner, first, steps[0], metadata, f"{subject} with {spec}: a step before requests ended")
        for count, step in ((2, steps[1]), (1, steps[2])):
            call, alone = _call(runner, step, cache), _first_requests(step, count)
            metadata = runner.builder.advance_step(metadata, num_queries=count)
            _run(runner, call, alone, metadata, f"{subject} with {spec}: {count} of 3 requests go on")

    @needs(paged=True, phases=("prefill", "decode"))
    def test_advance_after_prefills(self, subject: Subject, draw: Draw) -> None:
        """Requests whose prompts are complete turn into decodes without another build."""
        spec = draw(plain(subject, paged=True, phases=("prefill", "decode")))
        contexts, queries = (20, spec.fields["block_size"] - 1, 0), (1, 9, 21)
        lens: dict[str, Any] = {"context_lens": contexts, "query_lens": tuple(one + 2 for one in queries)}
        whole = materialize(spec.case(84, **lens, num_padding_tokens=0))
        ends = [tuple(map(sum, zip(contexts, queries, (more,) * 3, strict=True))) for more in range(3)]
        steps = [step_of(whole, list(zip(*pair, strict=True))) for pair in pairwise((contexts, *ends))]
        runner, cache = _with_cache(subject, spec, whole)
        calls = [_call(runner, step, cache) for step in steps]
        built = [runner.builder.build(calls[0].batch)]
        built.append(runner.builder.advance_step(built[0], prefills_to_decodes=True))
        built.append(runner.builder.advance_step(built[1]))
        for number, (call, step, metadata) in enumerate(zip(calls, steps, built, strict=True), 1):
            _run(
                runner, call, step, metadata, f"{subject} with {spec}: step {number} of prefills that turn into decodes"
            )

    @over(_cut_decodes)
    def test_fast_steps(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Steps that are built fast, as those of a draft model, give what others give."""
        spec = draw(point)
        whole, steps = decoded(spec)
        runner, cache = _with_cache(subject, spec, whole)
        for number, step in enumerate(steps[:2], 1):
            call = _call(runner, step, cache)
            metadata = runner.builder.build(call.batch, fast=True)
            _run(runner, call, step, metadata, f"{subject} with {spec}: step {number}, which is built fast")

    @over(_cascades)
    def test_cascade_equals_flat(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Cascade attention, which attends to a shared prefix once, gives what a flat step gives."""
        name, spec = point
        spec = draw(spec)
        case = spec.case(83)
        if name == "plain":  # as many tokens as the prefix has keys
            others = len(case.query_lens) - 1
            case = evolve(case, query_lens=(*[1] * others, case.common_prefix_len - others))
        if name == _LONG_PREFIX:  # and the first request waits in this step
            case = _with_longer_prefix(evolve(case, query_lens=(0, *case.query_lens[1:])))
        scene = materialize(case)
        runner = runner_for(subject, spec, scene, limits=limits_of(scene))
        for length, how in ((0, "flat"), (scene.case.common_prefix_len, "cascade")):
            call = runner.call(scene)
            runner.forward(call, runner.builder.build(evolve(call.batch, common_prefix_len=length)))
            runner.compare(call, scene, f"{subject} with {spec}, {how}")


def _with_longer_prefix(case: Case) -> Case:
    """Return the case with more than 512 keys in the prefix that its requests share."""
    longer = case.with_shared_prefix(-(-512 // case.block_size) + 1)
    return evolve(longer, common_prefix_len=longer.common_prefix_len + case.common_prefix_len)


def _first_requests(step: Scene, count: int) -> Scene:
    """Return the first requests of a step alone, in the same pages."""
    case = evolve(step.case, query_lens=step.case.query_lens[:count], context_lens=step.case.context_lens[:count])
    tokens = {name: getattr(step, name)[:count] for name in ("queries", "keys", "values", "block_table")}
    masks = None if step.masks is None else step.masks[:count]
    return evolve(step, case=case, masks=masks, **tokens)


def _order(spec: RequestSpec) -> tuple[str, ...]:
    """Return the order of the requests in each step, of the phases that are served."""
    phases = spec.fields.get("phases", ("decode", "prefill"))
    orders = dict.fromkeys(tuple(kind for kind in order if kind in phases) for order in _ORDERS)
    return random.Random(f"order {spec}").choice(list(orders))


def decoded(spec: RequestSpec) -> tuple[Scene, list[Scene]]:
    """Return a scene of decodes, and its steps. The first step fills a block of one request; two exceed windows."""
    contexts = (20, spec.fields["block_size"] - 1, 70)
    lens: dict[str, Any] = {"query_lens": (_STEPS,) * 3, "context_lens": contexts, "num_padding_tokens": 0}
    whole = materialize(spec.case(82, **lens, lens_on_cpu=spec.fields.get("seq_lens_cpu_kind", "exact")))
    return whole, [step_of(whole, [(length + n, length + n + 1) for length in contexts]) for n in range(_STEPS)]


def _with_cache(subject: Subject, spec: RequestSpec, whole: Scene) -> tuple[SceneRunner, KVCache]:
    """Return a layer, and the KV cache that its steps have in common."""
    runner = runner_for(subject, spec, whole)
    return runner, whole.paged(runner.backend, runner.backend.device).cache


def _call(runner: SceneRunner, step: Scene, cache: KVCache) -> Paged:
    """Return the arguments of a step, on a cache that earlier steps have written; another one if the host writes."""
    return step.paged(runner.backend, runner.backend.device, cache=None if step.case.kv_written else cache)


def _run(runner: SceneRunner, call: Paged, step: Scene, metadata: Metadata, what: str) -> None:
    """Run a step of these metadata, and compare it."""
    call = evolve(call, batch=metadata.batch)
    runner.forward(call, metadata)
    runner.compare(call, step, what)
