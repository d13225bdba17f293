"""Other ways to compute the same attention: chunked prefill, advanced steps, and cascade attention."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug.contract import Batch
from attnplug_kit.conformance.drawing import OF_HOSTS
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.serving import plain, runner_for
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.oracle import Paged, assert_output, materialize
from attnplug_kit.oracle.rounding import as_host_gives

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Scene, SceneRunner

    Spans = Sequence[tuple[int, int]]  # the first and the last token of each request, in its sequence

_FEATURES: Final = ("sliding_window", "attention_chunk", "logits_soft_cap", "alibi", "sinks", "kv_cache_dtype")

_STEPS: Final = 4

_CASCADES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "soft cap": {"logits_soft_cap": 2.0},
    "sinks and LSE": {"sinks": True, "return_lse": True},
}


def _features(subject: Subject) -> Mapping[str, RequestSpec]:
    specs = field_values_of(subject).of(*_FEATURES)
    return {name: spec for name, spec in specs.items() if spec.fields.get("paged")}


def _cascades(subject: Subject) -> dict[str, RequestSpec]:
    found = {name: field_values_of(subject).spec(cascade=True, **fields) for name, fields in _CASCADES.items()}
    return {name: spec for name, spec in found.items() if spec is not None}


class Stepping(Tier):
    """Steps that build on each other, and steps with a shared prefix, give the result of one plain step."""

    @over(_features)
    def test_chunked_equals_one_shot(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Chunked prefill gives what a prefill of the whole prompt gives."""
        point = draw(point, keep=OF_HOSTS)
        whole = materialize(point.case(81, query_lens=(45,), context_lens=(0,), num_padding_tokens=0))
        runner, cache = _with_cache(subject, point, whole)
        for start, end in pairwise(accumulate((0, 16, 1, 9, 19))):
            metadata = runner.builder.build(_batch(runner, whole, [(start, end)]))
            output = _run(runner, whole, cache, [(start, end)], metadata)
            what = f"{subject} with {point}: tokens {start} to {end} of a chunked prefill"
            _compare(whole, output, slice(start, end), what)

    @needs(paged=True, phases=("decode",))
    def test_advance_step(self, subject: Subject, draw: Draw) -> None:
        """Metadata of advanced steps decodes the next tokens, and that of the steps before stays the same."""
        spec = draw(plain(subject, paged=True, phases=("decode",)), keep=OF_HOSTS)
        last = spec.fields["block_size"] - 1  # one step fills a block, and the next one begins another
        lens: dict[str, Any] = {"query_lens": (_STEPS,) * 3, "context_lens": (20, last, 9), "num_padding_tokens": 0}
        whole = materialize(spec.case(82, **lens))
        runner, cache = _with_cache(subject, spec, whole)
        contexts = whole.case.context_lens
        steps = [[(length + step, length + step + 1) for length in contexts] for step in range(_STEPS)]
        built = [runner.builder.build(_batch(runner, whole, steps[0]))]
        for _ in steps[1:]:
            built.append(runner.builder.advance_step(built[-1]))
        for step, metadata in enumerate(built):
            output = _run(runner, whole, cache, steps[step], metadata)
            _compare(whole, output, slice(step, None, _STEPS), f"{subject}: step {step + 1} of an advanced batch")

    @over(_cascades)
    def test_cascade_equals_flat(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Cascade attention, which attends to a shared prefix once, gives what a flat step gives."""
        point = draw(point, keep=("kv_in_cache",))
        scene = materialize(point.case(83))
        runner = runner_for(subject, point, scene)
        for length, name in ((0, "flat"), (scene.case.common_prefix_len, "cascade")):
            call = runner.call(scene)
            runner.forward(call, runner.builder.build(evolve(call.batch, common_prefix_len=length)))
            runner.compare(call, scene, f"{subject} with {point}, {name}")


def _with_cache(subject: Subject, spec: RequestSpec, whole: Scene) -> tuple[SceneRunner, Any]:
    runner = runner_for(subject, spec, whole)
    call = runner.call(whole)
    if not isinstance(call, Paged):
        raise TypeError("steps follow each other in a paged cache")
    return runner, call.cache


def _batch(runner: SceneRunner, whole: Scene, spans: Spans) -> Batch:
    slots = [_slots(whole, request)[start:end] for request, (start, end) in enumerate(spans)]
    return Batch.from_lengths(
        [end - start for start, end in spans],
        [end for _, end in spans],
        block_table=whole.block_table,
        slot_mapping=torch.cat(slots),
        device=runner.backend.device,
    )


def _slots(whole: Scene, request: int) -> Tensor:
    """Return the slots of all tokens of a request."""
    size, length = whole.case.block_size, whole.case.seq_lens[request]
    positions = torch.arange(length)
    return whole.block_table[request].long()[positions // size] * size + positions % size


def _run(runner: SceneRunner, whole: Scene, cache: Any, spans: Spans, metadata: Any) -> Tensor:
    """Run a part of each request of a scene, on a cache that earlier steps have written."""
    contexts, device = whole.case.context_lens, runner.backend.device
    new = [slice(start - contexts[r], end - contexts[r]) for r, (start, end) in enumerate(spans)]
    query = torch.cat([rows[part] for rows, part in zip(whole.queries, new, strict=True)]).to(device)
    key, value = (
        torch.cat([rows[start:end] for rows, (start, end) in zip(requests, spans, strict=True)]).to(device)
        for requests in (whole.keys, whole.values)
    )
    if runner.impl.host_writes:
        runner.impl.write_kv(key, value, cache, metadata.batch.slot_mapping)
    output = query.new_full((query.shape[0], whole.case.num_q_heads * value.shape[2]), torch.nan)
    query = as_host_gives(query, runner.backend, whole.rounding)
    lse = torch.empty(query.shape[:2], device=device) if runner.backend.agreement.requirements.return_lse else None
    runner.impl.forward(query, key, value, cache, metadata, output, lse=lse)
    return output.view(*query.shape[:2], -1)


def _compare(whole: Scene, output: Tensor, rows: slice, what: str) -> None:
    try:
        assert_output(output, whole, rows=rows)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
