"""Captured once, replayed for many batches: a replay reads nothing but the tensors of the graph buffers."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from attrs import evolve

from attnplug.contract import GraphShape
from attnplug_kit.conformance.drawing import OF_HOSTS
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.serving import load_for
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.oracle import check_replays, check_replays_without_build, check_shared_state, materialize

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug_kit.conformance.drawing import Draw
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
    "kv_cache_form",
    "return_lse",
    "block_sparse",
)
_SIZES: Final = ("num_kv_heads", "gqa_ratio", "head_size", "block_size")
_STEPS: Final = ((5, 30, 0), (41,), (17, 17, 17, 2), (300, 3, 128))  # context lengths of the requests of each replay
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


def _plain_levels(subject: Subject) -> dict[str, tuple[str, RequestSpec]]:
    """Return each level alone."""
    return {name: found for name, found in _levels(subject).items() if name.startswith("cudagraph")}


def _pairs(subject: Subject) -> dict[str, tuple[str, tuple[RequestSpec, RequestSpec]]]:
    """Return pairs of agreements: the plainest with pages, and one that differs in a field, at the highest level."""
    declared = field_values_of(subject)
    level = declared.values().get("cudagraph", ("never",))[-1]
    fields = {"paged": True} if level == "never" else {"cudagraph": level}
    plain = declared.spec(**fields)
    if plain is None or not plain.fields.get("paged", True):
        return {}
    found: dict[str, tuple[str, tuple[RequestSpec, RequestSpec]]] = {}
    for item in declared.specs:
        if item.field in (*_FEATURES, *_SIZES):
            other = declared.spec(**{**fields, item.field: item.value})
            found |= {} if other is None else {str(item): (level, (plain, other))}
    return found


class Graphs(Tier):
    """CUDA graphs. Without CUDA a replay is the captured call, repeated with the same tensors and numbers."""

    @over(_levels)
    def test_replays(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """One capture serves batches of other lengths, in other pages, with fewer requests than its shape has."""
        level, spec = point
        spec = draw(spec, keep=OF_HOSTS)
        uniform, steps, query_len = _uniform(subject, spec, level)
        _check(subject, uniform, steps, _REQUESTS * query_len)
        if level == "always" and not spec.fields.get("custom_mask"):  # whose graphs have one query length
            _check(subject, spec, _MIXED, _TOKENS, num_tokens=_TOKENS)
        record.exercised("cudagraph", level)

    @over(_plain_levels)
    def test_prepared_replays(self, subject: Subject, draw: Draw, point: Any) -> None:
        """A graph that prepares itself needs from a build what `plan_batch` writes, and computes the rest."""
        level, spec = point
        spec = draw(spec, keep=OF_HOSTS)
        uniform, steps, query_len = _uniform(subject, spec, level)
        _check(subject, uniform, steps, _REQUESTS * query_len, prepares=True)

    @over(_plain_levels)
    def test_replays_without_build(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Replays follow lengths and pages that change on the device, where the builder says so."""
        level, spec = point
        spec = draw(spec, keep=OF_HOSTS)
        uniform, _, query_len = _uniform(subject, spec, level)
        contexts = [(*lens, 9, 33, 1, 18, 2)[:_REQUESTS] for lens in _STEPS]
        scenes = _scenes(uniform, [((query_len,) * _REQUESTS, lens) for lens in contexts], _REQUESTS * query_len)
        with _naming(subject, uniform, "a replay without a build"):
            backend = load_for(subject, uniform, scenes[0].case)
            if not check_replays_without_build(backend, scenes, max_seq_len=max(map(max, contexts)) + query_len + 7):
                pytest.skip(f"{subject}: its builder needs a build for each replay (replays_without_build)")

    @over(_pairs)
    def test_agreements_of_one_state(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Layers of two agreements share workspace and graph buffers, and keep their own plans."""
        level, specs = point
        each = [_uniform(subject, draw(spec, keep=OF_HOSTS), level) for spec in specs]
        query_len = each[0][2]
        rows = _REQUESTS * query_len
        scenes = [_scenes(uniform, steps, rows) for uniform, steps, _ in each]
        shape = GraphShape(_REQUESTS, rows, query_len, max(map(max, _STEPS)) + query_len + 7)
        with _naming(subject, each[1][0], "with a plain agreement in one state"):
            backends = [
                load_for(subject, uniform, one[0].case) for (uniform, _, _), one in zip(each, scenes, strict=True)
            ]
            check_shared_state(backends, scenes, shape)


def _uniform(subject: Subject, spec: RequestSpec, level: str) -> tuple[RequestSpec, list[_Step], int]:
    """Return the request for decodes of one length, the steps, and that length."""
    decode = 1 if level in {"never", "single_token_decode"} else _longest_decode(subject)
    query_len = max(decode, 3) if level == "always" else decode
    uniform = spec.evolve(decode_query_len=decode if decode > 1 else None)
    return uniform, [((query_len,) * len(lens), lens) for lens in _STEPS], query_len


def _longest_decode(subject: Subject) -> int:
    """Return the query length of the decodes to replay: several tokens if that is declared, otherwise one."""
    declared = subject.supports.get("decode_query_len")
    return next((tokens for tokens in (3, 2) if declared is not None and declared.allows(tokens)), 1)


def _check(subject: Subject, spec: RequestSpec, steps: Sequence[_Step], rows: int, **how: Any) -> None:
    """Replay steps that are padded to so many rows."""
    scenes = _scenes(spec, steps, rows)
    longest = max(sum(each) for step in steps for each in zip(*step, strict=True))  # which the last step reaches
    with _naming(subject, spec, "a replay"):
        backend = load_for(subject, spec, scenes[0].case)
        check_replays(backend, scenes, num_reqs=_REQUESTS, max_seq_len=longest, **how)


@contextmanager
def _naming(subject: Subject, spec: RequestSpec, what: str) -> Iterator[None]:
    """Say in a failure what was tested."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{subject} with {spec}: {what}: {error}") from error


def _scenes(spec: RequestSpec, steps: Sequence[_Step], rows: int) -> list[Scene]:
    """Return the scenes of one layer's steps."""
    scenes = [_scene(spec, seed, step, rows) for seed, step in enumerate(steps)]
    return [evolve(scene, sinks=scenes[0].sinks) for scene in scenes]


def _scene(spec: RequestSpec, seed: int, step: _Step, rows: int) -> Scene:
    queries, contexts = step
    case = spec.case(91, query_lens=queries, context_lens=contexts, num_padding_tokens=rows - sum(queries))
    return materialize(evolve(case, seed=seed))
