"""Captured once, replayed for many batches: a replay reads nothing but the tensors of the graph buffers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.serving import load_for
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.oracle import check_replays, materialize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug_kit.conformance.report import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Scene

_FEATURES: Final = (
    "sliding_window",
    "attention_chunk",
    "logits_soft_cap",
    "alibi",
    "sinks",
    "custom_mask",
    "kv_cache_dtype",
    "kv_layout",
    "return_lse",
    "block_sparse",
)
_STEPS: Final = ((5, 30, 0), (41,), (17, 17, 17, 2))  # context lengths of the requests of each replay
_REQUESTS: Final = 5
_MIXED: Final = (((1, 1, 9), (5, 30, 0)), ((4,), (17,)), ((1, 2, 7, 11), (17, 2, 0, 40)))  # query and context lengths
_TOKENS: Final = 24
_Step = tuple[tuple[int, ...], tuple[int, ...]]


def _levels(subject: Subject) -> dict[str, tuple[str, RequestSpec]]:
    """Return each level alone, and the highest one with each feature."""
    declared = field_values_of(subject)
    found = {str(item): (item.value, spec) for item, spec in declared.specs.items() if item.field == "cudagraph"}
    highest = list(found.values())[-1:]
    for level, _ in highest:
        for item in declared.specs:
            if item.field in _FEATURES:
                spec = declared.spec(cudagraph=level, **{item.field: item.value})
                found |= {} if spec is None else {f"{item} cudagraph={level}": (level, spec)}
    return found


class Graphs(Tier):
    """CUDA graphs. Without CUDA a replay is the captured call, repeated with the same tensors and numbers."""

    @over(_levels)
    def test_replays(self, subject: Subject, record: Record, point: Any) -> None:
        """One capture serves batches of other lengths, in other pages, with fewer requests than its shape has."""
        level, spec = point
        decode = 1 if level == "single_token_decode" else _longest_decode(subject)
        query_len = max(decode, 3) if level == "always" else decode
        uniform = spec.evolve(decode_query_len=decode if decode > 1 else None)
        steps = [((query_len,) * len(lens), lens) for lens in _STEPS]
        _check(subject, uniform, steps, _REQUESTS * query_len)
        if level == "always":
            _check(subject, spec, _MIXED, _TOKENS, num_tokens=_TOKENS)
        record.exercised("cudagraph", level)


def _longest_decode(subject: Subject) -> int:
    """Return the query length of the decodes to replay: several tokens if that is declared, otherwise one."""
    declared = subject.supports.get("decode_query_len")
    return next((tokens for tokens in (3, 2) if declared is not None and declared.allows(tokens)), 1)


def _check(subject: Subject, spec: RequestSpec, steps: Sequence[_Step], rows: int, **shape: int) -> None:
    """Replay steps that are padded to so many rows."""
    scenes = [_scene(spec, seed, step, rows) for seed, step in enumerate(steps)]
    scenes = [evolve(scene, sinks=scenes[0].sinks) for scene in scenes]
    longest = max(sum(each) for step in steps for each in zip(*step, strict=True)) + 7
    try:
        backend = load_for(subject, spec, scenes[0].case)
        check_replays(backend, scenes, num_reqs=_REQUESTS, max_seq_len=longest, **shape)
    except AssertionError as error:
        raise AssertionError(f"{subject} with {spec}: a replay: {error}") from error


def _scene(spec: RequestSpec, seed: int, step: _Step, rows: int) -> Scene:
    queries, contexts = step
    case = spec.case(91, query_lens=queries, context_lens=contexts, num_padding_tokens=rows - sum(queries))
    return materialize(evolve(case, seed=seed))
