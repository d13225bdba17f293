"""What `build` may do and may not: plan, and nothing to what it was given."""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.require import require
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.conformance.serving import load_for, plain
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.oracle.running import compare
from attnplug_kit.oracle.scene import Paged, materialize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug_kit.conformance.record import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle.scene import Dense, Scene


def _lengths_known(subject: Subject) -> Mapping[str, RequestSpec]:
    asks = field_values_of(subject).asks.items()
    return {str(item): ask for item, ask in asks if item.field == "seq_lens_cpu_kind"}


def _own_inputs(subject: Subject) -> Mapping[str, RequestSpec]:
    """A plain ask, and one for each input that a layer brings along."""
    fields = ("alibi", "sinks", "kv_cache_dtype", "per_head_scales")
    asks = {str(item): ask for item, ask in field_values_of(subject).asks.items() if item.field in fields}
    return {"plain": plain(subject), **asks}


class Building(Tier):
    """Metadata: built once per step, from this step's batch, leaving everything else alone."""

    def test_build_mutates_nothing(self, subject: Subject) -> None:
        """The tensors of a batch are the same after a build."""
        rig, (scene,) = _rig(subject, 1)
        batch = rig.call(scene).batch
        before = _copies(batch.to_dict())
        rig.builder.build(batch)
        _demand_same(before, batch.to_dict(), f"{subject}: build changed")

    def test_forward_mutates_no_input(self, subject: Subject) -> None:
        """Queries, keys, values, the batch and the layer's tensors are the same after a forward."""
        rig, (scene,) = _rig(subject, 1)
        call = rig.call(scene)
        inputs = {"query": call.query, "key": call.key, "value": call.value, **call.batch.to_dict()}
        before = _copies(inputs)
        rig.forward(call, rig.builder.build(call.batch))
        _demand_same(before, inputs, f"{subject}: forward changed its input")

    def test_step_after_step(self, subject: Subject) -> None:
        """Each step runs on its own pages, also where the step before had the same lengths."""
        rig, scenes = _rig(subject, 3)
        for step, scene in enumerate(scenes, 1):
            _compare(rig, rig.run(scene).call, scene, f"{subject}: step {step} of one builder")

    def test_build_ahead(self, subject: Subject) -> None:
        """A step that was built runs as it was built, whatever is built after it."""
        rig, scenes = _rig(subject, 2)
        calls = [rig.call(scene) for scene in scenes]
        built = [rig.builder.build(call.batch) for call in calls]
        for call, metadata, scene in zip(calls, built, scenes, strict=True):
            rig.forward(call, metadata)
            _compare(rig, call, scene, f"{subject}: a step that was built before another one")

    def test_forward_twice(self, subject: Subject) -> None:
        """Several layers run on the metadata of one build: it is not used up."""
        rig, (scene,) = _rig(subject, 1)
        call = rig.call(scene)
        metadata = rig.builder.build(call.batch)
        for _ in range(2):
            rig.forward(call, metadata)
            _compare(rig, call, scene, f"{subject}: a layer after another one")

    def test_step_in_the_same_tensors(self, subject: Subject) -> None:
        """A host may write the next step into the tensors of the last one: nothing is known of a batch by its place."""
        rig, (scene, other) = _rig(subject, 2)
        call = rig.run(scene).call
        after = rig.call(other)
        if rig.backend.device.type == "cuda":
            torch.cuda.synchronize()  # the step is over: its tensors are not in use any more
        held: dict[str, Any] = {
            name: tensor for name, tensor in call.batch.to_dict().items() if isinstance(tensor, torch.Tensor)
        }
        for name, tensor in held.items():
            tensor.copy_(getattr(after.batch, name))
        rig.forward(after, rig.builder.build(evolve(after.batch, **held)))
        _compare(rig, after, other, f"{subject}: a step in the tensors of the step before")

    def test_fast_build(self, subject: Subject) -> None:
        """A build in a hurry plans the same attention."""
        rig, (scene,) = _rig(subject, 1)
        call = rig.call(scene)
        rig.forward(call, rig.builder.build(call.batch, fast=True))
        _compare(rig, call, scene, f"{subject}: a step that was built with fast=True")

    @over(_own_inputs)
    def test_layers_of_one_builder(self, subject: Subject, point: Any) -> None:
        """Layers that run on the metadata of one build have a scale, sinks, slopes and a cache of their own."""
        scenes = _layers(materialize(point.case(62)))
        backend = load_for(subject, point, scenes[0].case)
        scales = backend.impl_class.static_scales
        layers = [each.layer(f"layer.{n}", backend.device, scales=scales) for n, each in enumerate(scenes)]
        rigs = [Rig(backend, each, layer=layer) for each, layer in zip(scenes, layers, strict=True)]
        calls = [rig.call(scene) for rig, scene in zip(rigs, scenes, strict=True)]
        metadata = backend.make_builder([rig.impl for rig in rigs], rigs[0].state).build(calls[0].batch)
        for number, (rig, call, scene) in enumerate(zip(rigs, calls, scenes, strict=True), 1):
            rig.forward(call, metadata)
            _compare(rig, call, scene, f"{subject} with {point}: layer {number} of a builder for two")

    @needs(paged=True)
    def test_update_block_table(self, subject: Subject) -> None:
        """Metadata with another cache group's pages reads those, and the original still reads its own."""
        rig, scenes = _rig(subject, 2, paged=True)
        calls = [rig.call(scene) for scene in scenes]
        original = rig.builder.build(calls[0].batch)
        before = _copies(original.batch.to_dict())
        other = calls[1].batch
        updated = rig.builder.update_block_table(original, other.block_table, other.slot_mapping)  # type: ignore[arg-type]
        _demand_same(before, original.batch.to_dict(), f"{subject}: update_block_table changed the original's")
        for call, metadata, scene in zip(calls, (original, updated), scenes, strict=True):
            rig.forward(call, metadata)
            _compare(rig, call, scene, f"{subject}: {'updated' if metadata is updated else 'original'} metadata")

    @over(_lengths_known)
    def test_host_lengths(self, subject: Subject, record: Record, point: Any) -> None:
        """Lengths that the host knows roughly, or not at all, are read on the device."""
        scene = materialize(point.case(65))
        rig = Rig(load_for(subject, point, scene.case), scene)
        call = rig.call(scene)
        absent = point.fields["seq_lens_cpu_kind"] == "absent"
        known = None if absent or call.batch.seq_lens_cpu is None else call.batch.seq_lens_cpu + 3
        batch = evolve(call.batch, seq_lens_cpu=known, max_seq_len=call.batch.max_seq_len + 3)
        rig.forward(call, rig.builder.build(batch))
        _compare(rig, call, scene, f"{subject} with {point}")
        record.served(rig.backend)

    def test_threads(self, subject: Subject) -> None:
        """Threads with a builder each do not disturb each other."""
        ask = plain(subject)
        scenes = [materialize(ask.case(seed)) for seed in (66, 67, 68, 69)]
        backend = load_for(subject, ask, scenes[0].case)

        def work(scene: Scene) -> None:
            rig = Rig(backend, scene)
            for _ in range(3):
                _compare(rig, rig.run(scene).call, scene, f"{subject}: a thread among others")

        with ThreadPoolExecutor(len(scenes)) as pool:
            list(pool.map(work, scenes))

    def test_build_never_synchronizes(self, subject: Subject) -> None:
        """Neither build nor forward waits for the device."""
        rig, scenes = _rig(subject, 2)
        if rig.backend.device.type != "cuda":
            pytest.skip("there is no device that anybody could wait for")
        rig.run(scenes[0])  # compiles and loads
        call = rig.call(scenes[1])
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mode does not see every way to wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            rig.forward(call, rig.builder.build(call.batch))
        except RuntimeError as error:
            raise AssertionError(f"{subject}: build or forward waits for the device: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")
        _compare(rig, call, scenes[1], f"{subject}: a step that nobody waited for")

    def test_build_while_a_step_runs(self, subject: Subject) -> None:
        """The next step may be built while this one is still running on the device."""
        rig, scenes = _rig(subject, 2)
        calls = [rig.call(scene) for scene in scenes]
        first = rig.builder.build(calls[0].batch)
        if rig.backend.device.type == "cuda":
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - the only way to keep a stream busy
        rig.forward(calls[0], first)
        rig.forward(calls[1], rig.builder.build(calls[1].batch))
        for call, scene in zip(calls, scenes, strict=True):
            _compare(rig, call, scene, f"{subject}: a step that ran while the next one was built")


def _rig(subject: Subject, count: int, **fields: Any) -> tuple[Rig, list[Scene]]:
    """A layer, and scenes of equal lengths with other tokens in other pages."""
    ask = plain(subject, **fields)
    case = ask.case(61)
    scenes = [materialize(evolve(case, seed=61 + step)) for step in range(count)]
    return Rig(load_for(subject, ask, case), scenes[0]), scenes


def _layers(first: Scene) -> tuple[Scene, Scene]:
    """Two layers of one step: the same requests in the same pages, and all else differs."""
    other = materialize(evolve(first.case, seed=first.case.seed + 1))
    slopes, rounding = first.alibi_slopes, first.rounding
    second = evolve(
        other,
        block_table=first.block_table,
        masks=first.masks,
        scale=2 * first.scale,
        alibi_slopes=None if slopes is None else slopes / 2,
        rounding=None
        if rounding is None
        else evolve(rounding, key_scale=2 * rounding.key_scale, value_scale=2 * rounding.value_scale),
    )
    return first, second


def _compare(rig: Rig, call: Dense | Paged, scene: Scene, what: str) -> None:
    try:
        compare(rig.ran(call, scene), rig.backend, scene)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def _copies(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def _demand_same(before: Mapping[str, Tensor], now: Mapping[str, Any], what: str) -> None:
    for name, tensor in before.items():
        same = torch.equal(tensor.nan_to_num(), now[name].nan_to_num())
        require(same, f"{what} {name}: what it is given belongs to the host")
