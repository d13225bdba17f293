"""Nothing that was asked for is ignored: the kit changes one input, and the output has to move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.require import require
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.conformance.serving import load_for
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.oracle.closeness import tolerance
from attnplug_kit.oracle.scene import materialize
from attnplug_kit.oracle.sparsity import EVERYTHING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle.scene import Scene

_LENGTHS: Final[dict[str, Any]] = {"query_lens": (1, 12), "context_lens": (45, 20)}
_FEATURES: Final = (
    "sliding_window",
    "attention_chunk",
    "logits_soft_cap",
    "alibi",
    "sinks",
    "causal",
    "custom_mask",
    "block_sparse",
)
_WITHOUT: Final = {"block_sparse": tuple(sorted(EVERYTHING.items()))}  # there may be nothing without a pattern
_GAINS: Final = (4.0, 1.0)  # scores that a soft cap bends; scores beside which a sink counts


def _slopes(scene: Scene) -> Scene:
    return evolve(scene, alibi_slopes=None if scene.alibi_slopes is None else scene.alibi_slopes * 8)


def _sinks(scene: Scene) -> Scene:
    return evolve(scene, sinks=None if scene.sinks is None else scene.sinks + 8)


def _masks(scene: Scene) -> Scene:
    return evolve(scene, masks=None if scene.masks is None else tuple(~mask for mask in scene.masks))


def _scale(scene: Scene) -> Scene:
    return evolve(scene, scale=scene.scale * 3)


def _k_scale(scene: Scene) -> Scene:
    rounding = scene.rounding
    return evolve(scene, rounding=None if rounding is None else evolve(rounding, key_scale=rounding.key_scale * 4))


def _v_scale(scene: Scene) -> Scene:
    rounding, case = scene.rounding, evolve(scene.case, v_scale=scene.case.v_scale * 4)
    changed = None if rounding is None else evolve(rounding, value_scale=rounding.value_scale * 4)
    return evolve(scene, case=case, rounding=changed)


_INPUTS: Final[Mapping[str, tuple[dict[str, Any], Callable[[Scene], Scene]]]] = {
    "scale": ({}, _scale),
    "sinks": ({"sinks": True}, _sinks),
    "alibi_slopes, linear": ({"alibi": "linear"}, _slopes),
    "alibi_slopes, sqrt": ({"alibi": "sqrt"}, _slopes),
    "custom_mask": ({"custom_mask": True}, _masks),
    "k_scale of fp8_e4m3": ({"kv_cache_dtype": "fp8_e4m3"}, _k_scale),
    "v_scale of fp8_e4m3": ({"kv_cache_dtype": "fp8_e4m3"}, _v_scale),
    "k_scale of fp8_e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, _k_scale),
    "v_scale of fp8_e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, _v_scale),
    "k_scale per head": ({"per_head_scales": True, "kv_cache_dtype": "fp8_e4m3"}, _k_scale),
    "v_scale per head": ({"per_head_scales": True, "kv_cache_dtype": "fp8_e4m3"}, _v_scale),
}


def _inputs(subject: Subject) -> dict[str, Any]:
    found = {name: (name, field_values_of(subject).ask(**fields), change) for name, (fields, change) in _INPUTS.items()}
    return {name: point for name, point in found.items() if point[1] is not None}


def _features(subject: Subject) -> dict[str, Any]:
    """Each ask for a feature that changes what attention is, beside the same ask without it."""
    asks = field_values_of(subject).asks
    shown = {item: ask for item, ask in asks.items() if item.field in _FEATURES}
    without = {item: ask.and_(**{item.field: _WITHOUT.get(item.field)}) for item, ask in shown.items()}
    return {str(item): (item.field, ask, without[item]) for item, ask in shown.items() if _is_visible(item.value)}


def _is_visible(value: Any) -> bool:
    """Whether a value changes the outputs of the batch: a window, or a block, of more than its tokens does not."""
    size = dict(value)["block_size"] if isinstance(value, tuple) else value
    return not isinstance(size, int) or size < 30


class InputSensitivity(Tier):
    """A backend that silently ignores an input fails here, whatever its results are."""

    @over(_inputs)
    def test_input_is_used(self, subject: Subject, point: Any) -> None:
        """Another value of an input gives another output."""
        name, ask, change = point
        scene = materialize(ask.case(31, **_LENGTHS))
        changed, backend = change(scene), load_for(subject, ask, scene.case)
        first, second = Rig(backend, scene), Rig(backend, changed)
        outputs = [first.run(scene).output, _run_on(second, scene, changed)]
        message = f"{subject}: another value of {name} was given, and the output did not move: ignored"
        _demand_moved(outputs, message)

    @over(_features)
    def test_feature_is_used(self, subject: Subject, point: Any) -> None:
        """A request for a feature gives another output than the same request without it."""
        name, ask, without = point
        pairs = [(_scene(ask, gain), _scene(without, gain)) for gain in _GAINS]
        shown = max(pairs, key=_moves)  # in a half type, not every batch shows every feature
        outputs = [_output(subject, *each) for each in zip((ask, without), shown, strict=True)]
        value = dict(ask.pairs)[name]
        message = f"{subject}: {name}={value} was asked for, and the output is that of a request without it: ignored"
        _demand_moved(outputs, message)


def _run_on(rig: Rig, scene: Scene, changed: Scene) -> Tensor:
    """Run the call of a scene with the changed inputs that come with the call; what is cached stays as it is."""
    call = rig.call(evolve(changed, rounding=scene.rounding))
    rig.forward(call, rig.builder.build(call.batch))
    return rig.ran(call, scene).output


def _scene(ask: RequestSpec, gain: float) -> Scene:
    lengths = _LENGTHS if "attn_type" not in ask.fields else {}
    scene = materialize(ask.case(32, **lengths, gain=gain))
    return evolve(scene, sinks=None if scene.sinks is None else scene.sinks + 3)


def _moves(scenes: tuple[Scene, Scene]) -> float:
    """How far the oracle's outputs of two scenes lie apart."""
    first, second = (scene.expected().output for scene in scenes)
    return float((first - second).abs().max())


def _output(subject: Subject, ask: RequestSpec, scene: Scene) -> Tensor:
    return Rig(load_for(subject, ask, scene.case), scene).run(scene).output


def _demand_moved(outputs: list[Tensor], message: str) -> None:
    first, second = (output.detach().cpu().double() for output in outputs)
    limit = 4 * tolerance(outputs[0].dtype).atol
    require(bool(torch.gt((first - second).abs().nan_to_num(0.0), limit).any()), message)
