"""The same attention by other ways: in chunks, after an advanced step, and with a shared prefix attended once."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug.contract import Batch
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.conformance.serving import load_for, plain
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.oracle.closeness import assert_close
from attnplug_kit.oracle.running import compare
from attnplug_kit.oracle.scales import as_host_gives
from attnplug_kit.oracle.scene import Paged, materialize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle.scene import Scene

_FEATURES: Final = ("sliding_window", "attention_chunk", "logits_soft_cap", "alibi", "sinks", "kv_cache_dtype")

_CASCADES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "sinks": {"sinks": True},
    "soft cap": {"logits_soft_cap": 2.0},
    "sinks and LSE": {"sinks": True, "return_lse": True},
}


def _features(subject: Subject) -> Mapping[str, RequestSpec]:
    asks = field_values_of(subject).asks.items()
    return {str(item): ask for item, ask in asks if item.field in _FEATURES and ask.fields.get("paged")}


def _cascades(subject: Subject) -> dict[str, RequestSpec]:
    found = {name: field_values_of(subject).ask(cascade=True, **fields) for name, fields in _CASCADES.items()}
    return {name: ask for name, ask in found.items() if ask is not None}


class Stepping(Tier):
    """Ways to the same result."""

    @over(_features)
    def test_chunked_equals_one_shot(self, subject: Subject, point: Any) -> None:
        """A prompt in chunks gives what it gives in one piece."""
        whole = materialize(point.case(81, query_lens=(45,), context_lens=(0,), num_padding_tokens=0))
        rig, cache = _paged(subject, point, whole)
        exact = whole.expected().output
        for start, end in pairwise(accumulate((0, 16, 1, 9, 19))):
            output = _attend(rig, whole, cache, [(start, end)])
            _compare(
                whole,
                output,
                exact[start:end],
                f"{subject} with {point}: tokens {start} to {end} of a prompt in chunks",
            )

    @needs(paged=True, phases=("decode",))
    def test_advance_step(self, subject: Subject) -> None:
        """Metadata that was advanced decodes the next token, and the step before is left alone."""
        ask = plain(subject, paged=True, phases=("decode",))
        last = ask.fields["block_size"] - 1  # one step fills a block, and the next one begins another
        lens: dict[str, Any] = {"query_lens": (2, 2, 2), "context_lens": (20, last, 9), "num_padding_tokens": 0}
        whole = materialize(ask.case(82, **lens))
        rig, cache = _paged(subject, ask, whole)
        exact, contexts = whole.expected().output, whole.case.context_lens
        steps = [[(length + step, length + step + 1) for length in contexts] for step in (0, 1)]
        batch = _batch(rig, whole, steps[0])
        first = rig.builder.build(batch)
        second = rig.builder.advance_step(first)
        for step, metadata in enumerate((first, second)):
            output = _run(rig, whole, cache, steps[step], metadata)
            _compare(whole, output, exact[step::2], f"{subject}: step {step + 1} of an advanced batch")

    @over(_cascades)
    def test_cascade_equals_flat(self, subject: Subject, point: Any) -> None:
        """A shared prefix that is attended once gives what it gives in each request."""
        scene = materialize(point.case(83))
        rig = Rig(load_for(subject, point, scene.case), scene)
        for length, name in ((0, "flat"), (scene.case.common_prefix_len, "cascade")):
            call = rig.call(scene)
            rig.forward(call, rig.builder.build(evolve(call.batch, common_prefix_len=length)))
            try:
                compare(rig.ran(call, scene), rig.backend, scene)
            except AssertionError as error:
                raise AssertionError(f"{subject} with {point}, {name}: {error}") from error


def _paged(subject: Subject, ask: RequestSpec, whole: Scene) -> tuple[Rig, Any]:
    rig = Rig(load_for(subject, ask, whole.case), whole)
    call = rig.call(whole)
    if not isinstance(call, Paged):
        raise TypeError("steps follow each other in a paged cache")
    return rig, call.cache


def _batch(rig: Rig, whole: Scene, spans: Sequence[tuple[int, int]]) -> Batch:
    slots = [_slots(whole, request)[start:end] for request, (start, end) in enumerate(spans)]
    return Batch.from_lengths(
        [end - start for start, end in spans],
        [end for _, end in spans],
        block_table=whole.block_table,
        slot_mapping=torch.cat(slots),
        device=rig.backend.device,
    )


def _slots(whole: Scene, request: int) -> Tensor:
    """The slots of all tokens of a request."""
    size, length = whole.case.block_size, whole.case.seq_lens[request]
    positions = torch.arange(length)
    return whole.block_table[request].long()[positions // size] * size + positions % size


def _attend(rig: Rig, whole: Scene, cache: Any, spans: Sequence[tuple[int, int]]) -> Tensor:
    return _run(rig, whole, cache, spans, rig.builder.build(_batch(rig, whole, spans)))


def _run(rig: Rig, whole: Scene, cache: Any, spans: Sequence[tuple[int, int]], metadata: Any) -> Tensor:
    contexts, device = whole.case.context_lens, rig.backend.device
    new = [slice(start - contexts[r], end - contexts[r]) for r, (start, end) in enumerate(spans)]
    query = torch.cat([rows[part] for rows, part in zip(whole.queries, new, strict=True)]).to(device)
    key, value = (
        torch.cat([rows[start:end] for rows, (start, end) in zip(given, spans, strict=True)]).to(device)
        for given in (whole.keys, whole.values)
    )
    if rig.impl.host_writes:
        rig.impl.write_kv(key, value, cache, metadata.batch.slot_mapping)
    output = query.new_full((query.shape[0], whole.case.num_q_heads * value.shape[2]), torch.nan)
    query = as_host_gives(query, rig.backend, whole.rounding)
    lse = torch.empty(query.shape[:2], device=device) if rig.backend.agreement.requirements.return_lse else None
    rig.impl.forward(query, key, value, cache, metadata, output, lse=lse)
    return output.view(*query.shape[:2], -1)


def _compare(whole: Scene, output: Tensor, exact: Tensor, what: str) -> None:
    try:
        assert_close(
            output,
            exact,
            dtype=output.dtype,
            scale=whole.largest_value,
            scaled_keys=whole.rounding is not None,
            byte_weights=whole.has_byte_weights,
        )
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error
