"""What is known late: block size and head counts after the selection, scales after `make_impl`, sinks in the call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import evolve

from attnplug import select
from attnplug.contract import AttentionImpl
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.request_spec import FP8_DTYPES
from attnplug_kit.conformance.serving import load_for, require
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.oracle import SceneRunner, materialize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.contract import Backend
    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject

_HEADS: Final = ("num_q_heads", "num_kv_heads")


def _block_sizes(subject: Subject) -> Mapping[str, RequestSpec]:
    return {name: spec for name, spec in field_values_of(subject).of("block_size").items() if spec.fields["paged"]}


def _head_counts(subject: Subject) -> Mapping[str, RequestSpec]:
    return field_values_of(subject).of("gqa_ratio", "num_kv_heads")


def _scaled(subject: Subject) -> Mapping[str, RequestSpec]:
    found = field_values_of(subject).of("kv_cache_dtype", "per_head_scales")
    return {name: spec for name, spec in found.items() if spec.fields.get("kv_cache_dtype") in FP8_DTYPES}


def _with_sinks(subject: Subject) -> Mapping[str, RequestSpec]:
    return field_values_of(subject).of("sinks")


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
        """Scales that follow `make_impl` are those of the cache and of the attention."""
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
        runner.impl.update_scales(**scales)
        runner.compare(runner.run(scene).call, scene, f"{subject} with {point}: scales that came after make_impl")

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


def _require_late(subject: Subject, backend: Backend) -> None:
    if backend.impl_class.parameters_changed is AttentionImpl.parameters_changed:
        pytest.skip(f"{subject}: {backend.impl_class.__name__} takes scales and sinks in make_impl only")
