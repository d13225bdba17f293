"""What is known late: block size and head counts, scales after `make_impl`, sinks in the call, and changed tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import evolve

from attnplug import select
from attnplug.contract import AttentionImpl, GraphShape
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.request_spec import FP8_DTYPES
from attnplug_kit.conformance.serving import load_for, require
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.oracle import SceneRunner, materialize
from attnplug_kit.oracle.replaying import ReplayRunner
from attnplug_kit.oracle.running import longest_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.contract import Layer, LoadedBackend
    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Scene

_HEADS: Final = ("num_q_heads", "num_kv_heads")


def _block_sizes(subject: Subject) -> Mapping[str, RequestSpec]:
    return {name: spec for name, spec in field_values_of(subject).of("block_size").items() if spec.fields["paged"]}


def _head_counts(subject: Subject) -> Mapping[str, RequestSpec]:
    return field_values_of(subject).of("gqa_ratio", "num_kv_heads")


def _scaled(subject: Subject) -> Mapping[str, RequestSpec]:
    found = field_values_of(subject).of("kv_cache_dtype", "per_head_scales")
    return {name: spec for name, spec in found.items() if spec.fields.get("kv_cache_dtype") in FP8_DTYPES}


def _scaled_graphs(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return the same at the highest level of graphs."""
    declared = field_values_of(subject)
    level = declared.values().get("cudagraph", ("never",))[-1]
    cached = {name: spec.fields for name, spec in _scaled(subject).items() if level != "never"}
    names = ("kv_cache_dtype", "per_head_scales")
    found = {
        name: declared.spec(cudagraph=level, **{key: fields[key] for key in names if key in fields})
        for name, fields in cached.items()
    }
    return {name: spec for name, spec in found.items() if spec is not None}


def _with_sinks(subject: Subject) -> Mapping[str, RequestSpec]:
    both = field_values_of(subject).spec(sinks=True, return_lse=True)
    return {**field_values_of(subject).of("sinks"), **({} if both is None else {"sinks=True return_lse=True": both})}


def _learned(subject: Subject) -> Mapping[str, RequestSpec]:
    return field_values_of(subject).of("sinks", "alibi")


class LateValues(Tier):
    """Values that a host binds after the selection, or gives after `make_impl`, count as if they had been there."""

    @over(_block_sizes)
    def test_late_block_size(self, subject: Subject, draw: Draw, point: Any) -> None:
        """A decision that is bound to a block size computes with that one, whatever the manifest names first."""
        _check_bound(subject, draw(point), "block_size")

    @over(_head_counts)
    def test_late_head_counts(self, subject: Subject, draw: Draw, point: Any) -> None:
        """A decision that is bound to head counts computes with those."""
        _check_bound(subject, draw(point), *_HEADS)

    @over(_scaled)
    def test_late_scales(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Scales that follow `make_impl`, or change in place, are those of the cache and of the attention."""
        point = draw(point)
        scene = materialize(point.case(81))
        backend = load_for(subject, point, scene.case)
        _require_late(subject, backend)
        layer = scene.layer(device=backend.device, scales=backend.impl_class.static_scales)
        names = [f"{one}_scale{form}" for one in "qkv" for form in ("", "_tensor")]
        scales = {name: getattr(layer, name) for name in names if getattr(layer, name) is not None}
        ones: dict[str, Any] = {
            n: torch.ones_like(s) if isinstance(s, torch.Tensor) else 1.0 for n, s in scales.items()
        }
        runner = SceneRunner(backend, scene, layer=evolve(layer, **ones))
        runner.run(scene)
        # The host changes them below.
        scales |= {name: one.clone() for name, one in scales.items() if isinstance(one, torch.Tensor)}
        runner.impl.update_scales(**scales)
        runner.compare(runner.run(scene).call, scene, f"{subject} with {point}: scales that came after make_impl")
        for role in _scaled_roles(scene):
            scene = _with_half_scale(scene, role)
            _change_scale(runner, scene, role)
            what = f"{subject} with {point}: the scale of {role}s, which the host has changed in place"
            runner.compare(runner.run(scene).call, scene, what)

    @over(_scaled_graphs)
    def test_scales_in_a_graph(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Where graphs read scale tensors, a replay computes with what the host has written into them."""
        spec = draw(point)
        scene = materialize(spec.case(83, query_lens=(1,) * 3, context_lens=(5, 30, 0), num_padding_tokens=0))
        backend = load_for(subject, spec, scene.case)
        shape = GraphShape(3, 3, 1, longest_of(scene.case))
        runner = ReplayRunner(backend, [scene], shape, layer=_with_own_scales(scene, backend))
        if not runner.impl.wrapped.graphs_read_scales:
            pytest.skip(f"{subject}: {backend.impl_class.__name__} refuses other scales behind a capture")
        graph, replay = runner.capture()
        halved = _with_half_scale(scene, "key")
        for each in (scene, halved, _with_half_scale(halved, "value")):
            call = runner.padded_call(each)
            for role in _scaled_roles(scene):
                _change_scale(runner, each, role)
            runner.place(call)
            runner.builder.build(call.batch, graph=graph)
            replay()
            runner.replayed(call, each)

    @over(_with_sinks)
    def test_sinks_with_call(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Each call computes with its own sinks."""
        point = draw(point)
        scene = materialize(point.case(82))
        if scene.sinks is None:
            raise AssertionError(f"{subject}: {point} has no sinks")
        backend = load_for(subject, point, scene.case)
        _require_late(subject, backend)
        layer = scene.layer(device=backend.device, scales=backend.impl_class.static_scales)
        runner = SceneRunner(backend, scene, layer=evolve(layer, sinks=None, sinks_with_call=True))
        for number, shift in enumerate((0.0, 3.0, 3.0, -2.0), 1):
            other = evolve(scene, sinks=scene.sinks + shift)
            call = runner.call(other)
            runner.forward(call, runner.builder.build(call.batch), sinks=(scene.sinks + shift).to(backend.device))
            runner.compare(call, other, f"{subject} with {point}: sinks of call {number}")

    @over(_learned)
    def test_changed_in_place(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Sinks and slopes that the host has written into the layer's tensors are those of the next call."""
        point = draw(point)
        scene = materialize(point.case(84))
        backend = load_for(subject, point, scene.case)
        _require_late(subject, backend)
        layer = scene.layer(device=backend.device, scales=backend.impl_class.static_scales)
        given = {name: getattr(layer, name) for name in ("sinks", "alibi_slopes")}
        own: dict[str, Any] = {name: one.clone() for name, one in given.items() if one is not None}
        runner = SceneRunner(backend, scene, layer=evolve(layer, **own))
        runner.run(scene)
        for factor in (2.0, 0.5):
            changed: dict[str, Any] = {name: getattr(scene, name) * factor for name in own}
            other = evolve(scene, **changed)
            for name, one in own.items():
                one.copy_(getattr(other, name))
            runner.impl.parameters_changed()
            runner.compare(runner.run(other).call, other, f"{subject} with {point}: {' and '.join(own)} in place")


def _check_bound(subject: Subject, spec: RequestSpec, *late: str) -> None:
    scene = materialize(spec.case(80))
    known = scene.case.requirements(**spec.engine)
    values = {name: getattr(known, name) for name in late}
    unbound = known.evolve(**dict.fromkeys(late), late=late)
    bound = select(unbound, subject.device, backend=subject.id).bind(**values)
    what = f"{subject} with {spec}, bound to {', '.join(f'{name}={value}' for name, value in values.items())}"
    wanted = select(known, subject.device, backend=subject.id).agreement
    require(bound.agreement == wanted, f"{what}: {bound.agreement}, and known before: {wanted}")
    runner = SceneRunner(bound.load(), scene)
    try:
        call = runner.run(scene).call
    except Exception as error:
        raise AssertionError(f"{what}: it raised {error!r}") from error
    runner.compare(call, scene, what)


def _with_own_scales(scene: Scene, backend: LoadedBackend) -> Layer:
    """Return the layer with scales of keys and values that no other layer has."""
    layer = scene.layer(device=backend.device, scales=backend.impl_class.static_scales)
    given = {name: getattr(layer, name) for name in ("k_scale_tensor", "v_scale_tensor")}
    own: dict[str, Any] = {name: None if one is None else one.clone() for name, one in given.items()}
    return evolve(layer, **own)


def _with_half_scale(scene: Scene, role: str) -> Scene:
    """Return the scene with another scale of keys or values, as with an FP8 cache that is calibrated again."""
    if scene.rounding is None:
        raise AssertionError(f"{scene.case} has no FP8 cache")
    return evolve(scene, rounding=scene.rounding.scaled(**{role: 0.5}))


def _scaled_roles(scene: Scene) -> tuple[str, ...]:
    """Return the roles with a scale of their own: values of latents have that of their keys."""
    return ("key",) if scene.case.latent else ("key", "value")


def _change_scale(runner: SceneRunner, scene: Scene, role: str) -> None:
    """Write the scale of a scene's keys or values into the tensor that the layer has."""
    name = f"{role[0]}_scale_tensor"
    own = getattr(runner.impl.layer, name)
    if own is None or scene.rounding is None:
        raise AssertionError(f"{scene.case} has no tensor of the scale of {role}s")
    own.copy_(getattr(scene.rounding, f"{role}_scale"))
    changed: dict[str, Any] = {name: own}
    runner.impl.update_scales(**changed)


def _require_late(subject: Subject, backend: LoadedBackend) -> None:
    if backend.impl_class.parameters_changed is AttentionImpl.parameters_changed:
        pytest.skip(f"{subject}: {backend.impl_class.__name__} takes scales and sinks in make_impl only")
