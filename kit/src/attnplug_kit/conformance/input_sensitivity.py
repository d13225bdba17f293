"""No input is ignored: the kit changes one input, and the output has to change."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug_kit.conformance.field_values import field_values_of, is_served
from attnplug_kit.conformance.serving import load_for, require, runner_for
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.fields import tested
from attnplug_kit.oracle import SceneRunner, materialize, tolerance
from attnplug_kit.oracle.attention import FULL_PATTERN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Scene

_LENGTHS: Final[dict[str, Any]] = {"query_lens": (1, 12), "context_lens": (45, 20)}
_WITHOUT: Final = {"block_sparse": tuple(sorted(FULL_PATTERN.items()))}  # a backend may serve patterns only
_UNDRAWN: Final[dict[str, Any]] = {  # the same in both requests
    "shared_blocks": 0,
    "score_shift": 0.0,
    "scale": 0.2,
    "k_scale": 0.3,
    "v_scale": 0.7,
}
_SWAPPED: Final = 0.5  # of the requests for features: the prefill comes first
_GAINS: Final = (4.0, 1.0)  # large scores show a soft cap, small ones a sink


def _slopes(scene: Scene) -> Scene:
    return evolve(scene, alibi_slopes=None if scene.alibi_slopes is None else scene.alibi_slopes * 8)


def _sinks(scene: Scene) -> Scene:
    return evolve(scene, sinks=None if scene.sinks is None else scene.sinks + 8)


def _masks(scene: Scene) -> Scene:
    return evolve(scene, masks=None if scene.masks is None else tuple(~mask for mask in scene.masks))


def _biases(scene: Scene) -> Scene:
    return evolve(scene, biases=None if scene.biases is None else tuple(-3 * bias for bias in scene.biases))


def _spans(scene: Scene) -> Scene:
    return evolve(
        scene, spans=None if scene.spans is None else tuple(torch.full_like(each, -1) for each in scene.spans)
    )


def _scale(scene: Scene) -> Scene:
    return evolve(scene, scale=scene.scale * 3)


def _k_scale(scene: Scene) -> Scene:
    return evolve(scene, rounding=None if scene.rounding is None else scene.rounding.scaled(key=4))


def _v_scale(scene: Scene) -> Scene:
    case = evolve(scene.case, v_scale=scene.case.v_scale * 4)
    return evolve(scene, case=case, rounding=None if scene.rounding is None else scene.rounding.scaled(value=4))


_INPUTS: Final[Mapping[str, tuple[dict[str, Any], Callable[[Scene], Scene]]]] = {
    "scale": ({}, _scale),
    "sinks": ({"sinks": True}, _sinks),
    "alibi_slopes, linear": ({"alibi": "linear"}, _slopes),
    "alibi_slopes, sqrt": ({"alibi": "sqrt"}, _slopes),
    "custom_mask": ({"custom_mask": True}, _masks),
    "attn_bias": ({"attn_bias": True, "paged": False}, _biases),
    "mm_prefix_range": ({"mm_prefix": True}, _spans),
    "k_scale of fp8_e4m3": ({"kv_cache_dtype": "fp8_e4m3"}, _k_scale),
    "v_scale of fp8_e4m3": ({"kv_cache_dtype": "fp8_e4m3"}, _v_scale),
    "k_scale of fp8_e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, _k_scale),
    "v_scale of fp8_e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, _v_scale),
    "k_scale per head": ({"per_head_scales": True, "kv_cache_dtype": "fp8_e4m3"}, _k_scale),
    "v_scale per head": ({"per_head_scales": True, "kv_cache_dtype": "fp8_e4m3"}, _v_scale),
}


def _inputs(subject: Subject) -> dict[str, Any]:
    declared = field_values_of(subject)
    found = {name: (name, declared.spec(**fields), change) for name, (fields, change) in _INPUTS.items()}
    return {name: point for name, point in found.items() if point[1] is not None}


def _features(subject: Subject) -> dict[str, Any]:
    """Return each request for a feature that changes attention, beside the same request without it."""
    specs = field_values_of(subject).specs.items()
    found = {item: spec for item, spec in specs if item.field in tested("effect")}
    shown = {item: spec for item, spec in found.items() if item.field == "topk" or _is_visible(item.value)}
    without = {item: _without(spec, item.field) for item, spec in shown.items()}
    return {str(item): (item.field, spec, without[item]) for item, spec in shown.items()}


def _without(spec: RequestSpec, name: str) -> RequestSpec:
    return spec.evolve(**{name: _WITHOUT.get(name)})


def _is_visible(value: Any) -> bool:
    """Whether a value changes the outputs of the batch: a window or a block larger than it does not."""
    size = dict(value)["block_size"] if isinstance(value, tuple) else value
    return not isinstance(size, int) or size < 30


class InputSensitivity(Tier):
    """A backend that ignores an input fails here, whatever its results are."""

    @over(_inputs)
    def test_input_is_used(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Another value of an input gives another output."""
        name, spec, change = point
        spec = draw(spec)
        scene = materialize(spec.case(31, any_order=True, **_LENGTHS, **_UNDRAWN))
        changed, backend = change(scene), load_for(subject, spec, scene.case)
        first, second = SceneRunner(backend, scene), SceneRunner(backend, changed)
        outputs = [first.run(scene).output, _run_changed(second, scene, changed)]
        expected = None if "_scale" in name else _difference((scene, changed))  # cached K/V keep their scales
        _require_change(outputs, expected, f"{subject}: another value of {name} does not change the output: ignored")

    @over(_features)
    def test_feature_is_used(self, subject: Subject, draw: Draw, point: Any) -> None:
        """A request for a feature gives another output than the same request without it."""
        name, spec, without = point
        drawn = draw(spec)
        if is_served(subject, other := _without(drawn, name)):
            spec, without = drawn, other
        swaps = random.Random(str(spec)).random() < _SWAPPED  # the same in both, whose rows are compared
        pairs = [(_scene(spec, gain, swaps=swaps), _scene(without, gain, swaps=swaps)) for gain in _GAINS]
        shown = max(pairs, key=_difference)  # in half precision, not every batch shows every feature
        outputs = [_output(subject, *each) for each in zip((spec, without), shown, strict=True)]
        requested = f"{subject}: {name}={dict(spec.pairs)[name]} was requested"
        _require_change(
            outputs, _difference(shown), f"{requested}, and the output is that of a request without it: ignored"
        )


def _run_changed(runner: SceneRunner, scene: Scene, changed: Scene) -> Tensor:
    """Run a scene with the changed inputs of the call; cached K/V stay the same."""
    call = runner.call(evolve(changed, rounding=scene.rounding))
    runner.forward(call, runner.builder.build(call.batch))
    return runner.result(call, scene).output


def _scene(spec: RequestSpec, gain: float, *, swaps: bool) -> Scene:
    lengths = _LENGTHS if "attn_type" not in spec.fields else {}
    scene = materialize(spec.case(32, **lengths, **_UNDRAWN, gain=gain).reordered(1 - swaps))
    return evolve(scene, sinks=None if scene.sinks is None else scene.sinks + 3)


def _difference(scenes: tuple[Scene, Scene]) -> float:
    """Return the largest difference between the oracle's outputs of two scenes."""
    first, second = (scene.expected().output for scene in scenes)
    return float((first - second).abs().max())


def _output(subject: Subject, spec: RequestSpec, scene: Scene) -> Tensor:
    return runner_for(subject, spec, scene).run(scene).output


def _require_change(outputs: list[Tensor], expected: float | None, message: str) -> None:
    """Require that some element changes by more than rounding, or by a part of what the oracle's changes by."""
    first, second = (output.detach().cpu().double() for output in outputs)
    limit = 4 * tolerance(outputs[0].dtype).atol
    limit = limit if expected is None else min(limit, expected / 4)
    require(bool(torch.gt((first - second).abs().nan_to_num(0.0), limit).any()), message)
