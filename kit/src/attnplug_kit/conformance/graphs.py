"""Captured once, replayed for many batches: a replay reads nothing but the tensors of the graph buffers."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest
from attrs import evolve

from attnplug.contract import GraphShape
from attnplug_kit.conformance.field_values import Capability, field_values_of
from attnplug_kit.conformance.serving import load_for
from attnplug_kit.conformance.stepping import decoded
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.fields import tested
from attnplug_kit.oracle import check_replays, check_replays_without_build, check_shared_state, materialize
from attnplug_kit.oracle.replaying import check_advanced_replays, check_shapes
from attnplug_kit.oracle.running import longest_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.report import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Scene

_TOGETHER: Final[dict[str, dict[str, Any]]] = {
    "sinks and LSE": {"sinks": True, "return_lse": True},
    "window and LSE": {"sliding_window": 7, "return_lse": True},
}
_WITH_MANY_KEYS: Final[dict[str, dict[str, Any]]] = {
    "sliding_window=500": {"sliding_window": 500},
    "attention_chunk=512": {"attention_chunk": 512},
    "return_lse=True": {"return_lse": True},
    "kv_cache_dtype=fp8_e4m3": {"kv_cache_dtype": "fp8_e4m3"},
}
"""Fields for which kernels may split many keys differently."""

_SHAPES: Final = ((5, 300), (9, 140), (20, 75))
"""Requests of a captured shape, and its longest context."""

_SOME: Final = tuple(7 * number % 50 for number in range(20))
"""Context lengths of requests that replays without a build have besides: all of a shape."""

_MANY_REQUESTS: Final = 136
_LONG: Final = ((5,), (70, 2100))
"""Context lengths of long replays, 600 at most where kernels are interpreted."""

_MIXED: Final = (  # query and context lengths, in orders that hosts have
    ((1, 1, 9), (5, 30, 0)),
    ((4,), (17,)),
    ((7, 1, 11, 2), (2, 0, 40, 17)),
)
_TOKENS: Final = 24
_Step = tuple[tuple[int, ...], tuple[int, ...]]


def _levels(subject: Subject) -> dict[str, tuple[str, RequestSpec]]:
    """Return each level alone, and the highest one with each feature."""
    declared = field_values_of(subject)
    found = {str(item): (item.value, spec) for item, spec in declared.specs.items() if item.field == "cudagraph"}
    highest = list(found.values())[-1:]
    for level, _ in highest:
        for item in declared.specs:
            if item.field in tested("graphs"):
                spec = declared.spec(cudagraph=level, **{item.field: item.value})
                found |= {} if spec is None else {f"{item} cudagraph={level}": (level, spec)}
        for name, fields in _TOGETHER.items():
            spec = declared.spec(cudagraph=level, **fields)
            found |= {} if spec is None else {f"{name} cudagraph={level}": (level, spec)}
    return found


def _plain_levels(subject: Subject) -> dict[str, tuple[str, RequestSpec]]:
    """Return each level alone."""
    return {name: found for name, found in _levels(subject).items() if name.startswith("cudagraph")}


def _decodes(subject: Subject) -> dict[str, RequestSpec]:
    """Return requests for graphs of decodes, a plain one and one with a window."""
    declared = field_values_of(subject)
    levels = [level for level in declared.values().get("cudagraph", ()) if level != "never"][-1:]
    found = {
        name: declared.spec(cudagraph=level, phases=("decode",), **fields)
        for level in levels
        for name, fields in {"plain": {}, "sliding_window=7": {"sliding_window": 7}}.items()
    }
    return {name: spec for name, spec in found.items() if spec is not None}


def _long(subject: Subject) -> dict[str, tuple[str, RequestSpec]]:
    """Return the highest level alone, and with each feature for which kernels may split many keys differently."""
    declared = field_values_of(subject)
    found = dict(list(_plain_levels(subject).items())[-1:])
    for level, _ in list(found.values()):
        for name, fields in _WITH_MANY_KEYS.items():
            spec = declared.spec(cudagraph=level, **fields)
            found |= {} if spec is None else {f"{name} cudagraph={level}": (level, spec)}
    return found


def _pairs(subject: Subject) -> dict[str, tuple[str, tuple[RequestSpec, RequestSpec]]]:
    """Return pairs of agreements: the plainest with pages, and one that differs in a field, at the highest level."""
    # Two values of a field are enough to find what one agreement leaves behind: the second, and the last.
    declared = field_values_of(subject)
    level = declared.values().get("cudagraph", ("never",))[-1]
    fields = {"paged": True} if level == "never" else {"cudagraph": level}
    plain = declared.spec(**fields)
    if plain is None or not plain.fields.get("paged", True):
        return {}
    names = {*tested("graphs"), *tested("sizes")}
    found: dict[str, tuple[str, tuple[RequestSpec, RequestSpec]]] = {"the same agreement": (level, (plain, plain))}
    for name, values in declared.values().items():
        for value in dict.fromkeys((*values[1:2], values[-1])) if name in names else ():
            other = declared.spec(**{**fields, name: value})
            found |= {} if other is None else {str(Capability(name, value)): (level, (plain, other))}
    return found


class Graphs(Tier):
    """CUDA graphs. Without CUDA a replay is the captured call, repeated with the same tensors and numbers."""

    @over(_levels)
    def test_replays(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """One capture serves batches of other lengths, in other pages, with fewer requests than its shape has."""
        level, spec = point
        spec = draw(spec)
        requests, contexts = _shape(spec)
        _check(subject, spec, level, contexts, requests)
        if level == "always" and not spec.fields.get("custom_mask"):  # whose graphs have one query length
            _check_replays(subject, spec, _MIXED, _TOKENS, num_reqs=5, num_tokens=_TOKENS)
        record.exercised("cudagraph", level)

    @over(_long)
    def test_long_replays(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Sequences of a few keys and of 2,100 take turns in one graph, with eager steps between."""
        level, spec = point
        steps = [tuple(min(keys, 600) for keys in step) for step in _LONG] if subject.is_interpreted else _LONG
        _check(subject, draw(spec), level, steps, requests=2)

    @over(_plain_levels)
    def test_replays_of_many_requests(self, subject: Subject, draw: Draw, point: Any) -> None:
        """A graph has as many requests as engines capture, and more than a warp or a block has threads."""
        level, spec = point
        requests = 12 if subject.is_interpreted else _MANY_REQUESTS
        spec = draw(spec)
        _check(subject, spec, level, _contexts(spec, requests, 60), requests)

    @over(_plain_levels)
    def test_replays_of_shapes(self, subject: Subject, draw: Draw, point: Any) -> None:
        """One builder has captured shapes whose replays take turns: none reads what is another's."""
        level, spec = point
        uniform, query_len = _uniform(subject, draw(spec), level)
        each = [
            (requests, _scenes(uniform, [((query_len,) * len(lens), lens) for lens in steps], requests * query_len))
            for requests, steps in (
                (9, ((70, 3, 17, 17, 4), (5, 30, 0))),
                (2, ((90, 12), (41,))),
                (2, ((12, 20), (7,))),  # another longest sequence alone
            )
        ]
        longest = [_longest_of(scenes) for _, scenes in each]
        longest[0] = max(longest)  # of the state
        with _naming(subject, uniform, "replays of several shapes"):
            backend = load_for(subject, uniform, each[0][1][0].case)
            shapes = [
                GraphShape(requests, requests * query_len, query_len, most)
                for (requests, _), most in zip(each, longest, strict=True)
            ]
            check_shapes(backend, shapes, [scenes for _, scenes in each])

    @over(_decodes)
    def test_advanced_replays(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Metadata of a graph that are advanced decode the next tokens in its replays."""
        spec = draw(point)
        whole, steps = decoded(spec)
        backend = load_for(subject, spec, whole.case)
        with _naming(subject, spec, "an advanced replay"):
            check_advanced_replays(backend, steps, max_seq_len=longest_of(whole.case))

    @over(_plain_levels)
    def test_prepared_replays(self, subject: Subject, draw: Draw, point: Any) -> None:
        """A graph that prepares itself needs from a build what `plan_batch` writes, and computes the rest."""
        level, spec = point
        spec = draw(spec)
        requests, contexts = _shape(spec)
        _check(subject, spec, level, contexts, requests, prepares=True)

    @over(_plain_levels)
    def test_replays_without_build(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Replays follow lengths and pages that change on the device, where the builder says so."""
        level, spec = point
        spec = draw(spec)
        requests, contexts = _shape(spec)
        uniform, query_len = _uniform(subject, spec, level)
        steps = [((query_len,) * requests, (*lens, *_SOME)[:requests]) for lens in contexts]
        scenes = _scenes(uniform, steps, requests * query_len)
        with _naming(subject, uniform, "a replay without a build"):
            backend = load_for(subject, uniform, scenes[0].case)
            if not check_replays_without_build(backend, scenes, max_seq_len=_longest_of(scenes) + 7):
                pytest.skip(f"{subject}: its builder needs a build for each replay (replays_without_build)")

    @over(_pairs)
    def test_agreements_of_one_state(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Layers of two agreements, or of two KV caches of one, share a state and a graph, and keep their own plans."""
        level, specs = point
        each = [_uniform(subject, draw(spec), level) for spec in specs]
        requests, query_len = 5, each[0][1]
        steps = [((query_len,) * len(lens), lens) for lens in _contexts(each[1][0], requests, 70)[:2]]
        rows = requests * query_len
        scenes = [_scenes(uniform, steps, rows, seed) for (uniform, _), seed in zip(each, (0, 7), strict=True)]
        shape = GraphShape(requests, rows, query_len, max(map(_longest_of, scenes)) + 7)
        with _naming(subject, each[1][0], "with a plain agreement in one state"):
            backends = [load_for(subject, uniform, one[0].case) for (uniform, _), one in zip(each, scenes, strict=True)]
            check_shared_state(backends, scenes, shape)


def _shape(spec: RequestSpec) -> tuple[int, tuple[tuple[int, ...], ...]]:
    """Return the number of requests of a graph, and the context lengths of its steps."""
    requests, longest = random.Random(f"shape {spec}").choice(_SHAPES)
    return requests, _contexts(spec, requests, longest)


def _contexts(spec: RequestSpec, requests: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Return context lengths of three steps: few requests, as many as there may be, and one. The longest has pages."""
    longest = max(longest, spec.fields.get("block_size", 0) + 9)
    return (5, 30, 0), (longest, 3, 17, 17, *(11 * number % 60 for number in range(requests - 4))), (41,)


def _uniform(subject: Subject, spec: RequestSpec, level: str) -> tuple[RequestSpec, int]:
    """Return the request for decodes of one length, and that length."""
    decode = 1 if level in {"never", "single_token_decode"} else _longest_decode(subject)
    return spec.evolve(decode_query_len=decode if decode > 1 else None), max(decode, 3) if level == "always" else decode


def _longest_decode(subject: Subject) -> int:
    """Return the query length of the decodes to replay: several tokens if that is declared, otherwise one."""
    declared = subject.supports.get("decode_query_len")
    return next((tokens for tokens in (3, 2) if declared is not None and declared.allows(tokens)), 1)


def _check(
    subject: Subject, spec: RequestSpec, level: str, contexts: Sequence[tuple[int, ...]], requests: int, **how: Any
) -> None:
    """Replay decodes of these context lengths, with at most so many requests."""
    uniform, query_len = _uniform(subject, spec, level)
    steps = [((query_len,) * len(lens), lens) for lens in contexts]
    _check_replays(subject, uniform, steps, requests * query_len, num_reqs=requests, **how)


def _check_replays(subject: Subject, spec: RequestSpec, steps: Sequence[_Step], rows: int, **how: Any) -> None:
    """Replay steps that are padded to so many rows, one of which is as long as the graph admits."""
    scenes = _scenes(spec, steps, rows)
    with _naming(subject, spec, "a replay"):
        backend = load_for(subject, spec, scenes[0].case)
        check_replays(backend, scenes, max_seq_len=_longest_of(scenes), **how)


@contextmanager
def _naming(subject: Subject, spec: RequestSpec, what: str) -> Iterator[None]:
    """Say in a failure what was tested."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{subject} with {spec}: {what}: {error}") from error


def _scenes(spec: RequestSpec, steps: Sequence[_Step], rows: int, seed: int = 0) -> list[Scene]:
    """Return the scenes of one layer's steps."""
    scenes = [_scene(spec, number, step, rows) for number, step in enumerate(steps, seed)]
    return [evolve(scene, sinks=scenes[0].sinks) for scene in scenes]


def _longest_of(scenes: Sequence[Scene]) -> int:
    """Return the longest sequence of all steps, as far as the CPU knows it."""
    return max(longest_of(scene.case) for scene in scenes)


def _scene(spec: RequestSpec, seed: int, step: _Step, rows: int) -> Scene:
    queries, contexts = step
    case = spec.case(91, query_lens=queries, context_lens=contexts, num_padding_tokens=rows - sum(queries))
    return materialize(evolve(case, seed=seed))
