"""What `build` and `forward` may do to their inputs, and when metadata may be used."""

from __future__ import annotations

import random
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import evolve

from attnplug_kit.conformance.drawing import OF_HOSTS
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.serving import load_for, plain, require, runner_for
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.fields import tested
from attnplug_kit.oracle import SceneRunner, materialize
from attnplug_kit.oracle.padding import with_inexact_lens, with_wider_table
from attnplug_kit.oracle.rounding import as_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.report import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Case, Scene


_MOST_BUILDS: Final = 40
"""Steps at most until metadata have the address of others: a few of the first do, unless somebody keeps them all."""


def _seq_lens_cpu_kinds(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return requests for each kind: where one is not declared, core reads the lengths from the device."""
    declared = field_values_of(subject)
    requests = {
        f"seq_lens_cpu_kind={kind}{'' if paged else ' dense'}": declared.spec(seq_lens_cpu_kind=kind, paged=paged)
        for kind in ("upper_bound", "absent")
        for paged in (True, False)
    }
    return {name: spec for name, spec in requests.items() if spec is not None}


def _query_lens_cpu_kinds(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return requests of a host without query lengths on the CPU, which every variant serves."""
    fields = {"seq_lens_cpu_kind": "absent", "query_lens_cpu_kind": "absent"}
    requests = {
        "paged" if paged else "dense": field_values_of(subject).spec(**fields, paged=paged) for paged in (True, False)
    }
    return {name: spec for name, spec in requests.items() if spec is not None}


def _layer_inputs(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return a plain request, and one for each input that is a layer's own."""
    own = field_values_of(subject).of(*tested("layers"))
    return {"plain": plain(subject), **own}


def _kept_inputs(subject: Subject) -> Mapping[str, RequestSpec]:
    return {**_layer_inputs(subject), **field_values_of(subject).of("dtype")}


class Building(Tier):
    """Metadata: built once per step, from this step's batch, without side effects."""

    def test_build_mutates_nothing(self, subject: Subject, draw: Draw) -> None:
        """The tensors of a batch are the same after a build."""
        runner, (scene,) = _runner(draw, subject, 1)
        batch = runner.call(scene).batch
        before = _copies(batch.to_dict())
        runner.builder.build(batch)
        _require_same(before, batch.to_dict(), f"{subject}: build changed")

    @over(_kept_inputs)
    def test_forward_mutates_no_input(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Queries, keys, values, the batch and the layer's tensors are the same after a forward."""
        spec = draw(point, keep=("kv_in_cache",))
        scene = materialize(spec.case(61))
        runner = runner_for(subject, spec, scene)
        call = runner.call(scene)
        inputs = {"query": call.query, "key": call.key, "value": call.value, **call.selection, **call.batch.to_dict()}
        before = _copies(inputs)
        runner.forward(call, runner.builder.build(call.batch))
        _require_same(before, inputs, f"{subject}: forward changed its input")

    def test_step_after_step(self, subject: Subject, draw: Draw) -> None:
        """Each step reads its own pages, also after a step of the same lengths."""
        runner, scenes = _runner(draw, subject, 3)
        for step, scene in enumerate(scenes, 1):
            runner.compare(runner.run(scene).call, scene, f"{subject}: step {step} of one builder")

    def test_metadata_in_the_place_of_another(self, subject: Subject, draw: Draw) -> None:
        """Metadata of a later step may have the address that those of an earlier one had."""
        runner, scenes = _runner(draw, subject, 3)
        places: dict[int, int] = {}
        source = random.Random(0)  # in a fixed order, each scene might get the same place every time
        for _ in range(_MOST_BUILDS):
            which = source.randrange(3)
            call = runner.call(scenes[which])
            metadata = runner.builder.build(call.batch)
            was_of_other = places.setdefault(id(metadata), which) != which
            runner.forward(call, metadata)
            del metadata
            if was_of_other:
                runner.compare(call, scenes[which], f"{subject}: metadata in the place of that of another step")
                return

    def test_build_ahead(self, subject: Subject, draw: Draw) -> None:
        """Building another step changes nothing for a step that was built before."""
        runner, scenes = _runner(draw, subject, 2)
        calls = [runner.call(scene) for scene in scenes]
        built = [runner.builder.build(call.batch) for call in calls]
        for call, metadata, scene in zip(calls, built, scenes, strict=True):
            runner.forward(call, metadata)
            runner.compare(call, scene, f"{subject}: a step that was built before another one")

    def test_builders_in_turns(self, subject: Subject, draw: Draw) -> None:
        """Two builders that share a state, as two cache groups do, plan their own steps, whoever builds last."""
        runner, scenes = _runner(draw, subject, 3)
        builders = (runner.builder, runner.backend.make_builder([runner.impl], runner.state))
        for pair in (scenes[:2], scenes[1:], scenes[1::-1]):
            calls = [runner.call(scene) for scene in pair]
            built = [builder.build(call.batch) for builder, call in zip(builders, calls, strict=True)]
            for call, metadata, scene in zip(calls, built, pair, strict=True):
                runner.forward(call, metadata)
                runner.compare(call, scene, f"{subject}: one of two builders in turns")

    def test_forward_twice(self, subject: Subject, draw: Draw) -> None:
        """Several layers use the metadata of one build."""
        runner, (scene,) = _runner(draw, subject, 1)
        call = runner.call(scene)
        metadata = runner.builder.build(call.batch)
        for _ in range(2):
            runner.forward(call, metadata)
            runner.compare(call, scene, f"{subject}: a layer after another one")

    def test_step_in_reused_tensors(self, subject: Subject, draw: Draw) -> None:
        """A host may write the next step into the tensors of the last one: their addresses identify no batch."""
        runner, (scene, other) = _runner(draw, subject, 2)
        call = runner.run(scene).call
        after = runner.call(other)
        if runner.backend.device.type == "cuda":
            torch.cuda.synchronize()  # the first step is finished: its tensors may be overwritten
        held: dict[str, Any] = {
            name: tensor for name, tensor in call.batch.to_dict().items() if isinstance(tensor, torch.Tensor)
        }
        for name, tensor in held.items():
            tensor.copy_(getattr(after.batch, name))
        runner.forward(after, runner.builder.build(evolve(after.batch, **held)))
        runner.compare(after, other, f"{subject}: a step in the tensors of the step before")

    def test_fast_build(self, subject: Subject, draw: Draw) -> None:
        """A fast build plans the same attention."""
        runner, (scene,) = _runner(draw, subject, 1)
        call = runner.call(scene)
        runner.forward(call, runner.builder.build(call.batch, fast=True))
        runner.compare(call, scene, f"{subject}: a fast build")

    @over(_layer_inputs)
    def test_layers_of_one_builder(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Layers that share the metadata of one build keep their own scale, sinks, slopes and cache."""
        spec = draw(point)
        scenes = _two_layers(materialize(spec.case(62)))
        backend = load_for(subject, spec, scenes[0].case)
        scales = backend.impl_class.static_scales
        layers = [each.layer(f"layer.{n}", backend.device, scales=scales) for n, each in enumerate(scenes)]
        runners = [SceneRunner(backend, each, layer=layer) for each, layer in zip(scenes, layers, strict=True)]
        calls = [runner.call(scene) for runner, scene in zip(runners, scenes, strict=True)]
        calls[1] = evolve(calls[1], **calls[0].selection)  # type: ignore[arg-type] # layers may reuse indices
        metadata = backend.make_builder([runner.impl for runner in runners], runners[0].state).build(calls[0].batch)
        for number, (runner, call, scene) in enumerate(zip(runners, calls, scenes, strict=True), 1):
            runner.forward(call, metadata)
            runner.compare(call, scene, f"{subject} with {spec}: layer {number} of a builder for two")

    @needs(paged=True)
    def test_update_block_table(self, subject: Subject, draw: Draw) -> None:
        """Metadata with another cache group's pages reads those, and the original still reads its own."""
        runner, scenes = _runner(draw, subject, 2, paged=True)
        calls = [runner.call(scene) for scene in scenes]
        original = runner.builder.build(calls[0].batch)
        before = _copies(original.batch.to_dict())
        other = calls[1].batch
        updated = runner.builder.update_block_table(original, other.block_table, other.slot_mapping)  # type: ignore[arg-type]
        _require_same(before, original.batch.to_dict(), f"{subject}: update_block_table changed the original's")
        for call, metadata, scene in zip(calls, (original, updated), scenes, strict=True):
            runner.forward(call, metadata)
            runner.compare(call, scene, f"{subject}: {'updated' if metadata is updated else 'original'} metadata")

    @over(_seq_lens_cpu_kinds)
    def test_seq_lens_cpu_kind(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """Lengths of which the CPU has an upper bound, or nothing, are read on the device."""
        spec = draw(point)
        scene = materialize(_with_keys_alone(spec, 65))
        runner = runner_for(subject, spec, scene)
        call = runner.call(scene)
        batch = with_inexact_lens(call.batch, spec.fields["seq_lens_cpu_kind"])
        runner.forward(call, runner.builder.build(batch))
        runner.compare(call, scene, f"{subject} with {spec}")
        record.served(runner.backend)

    @over(_query_lens_cpu_kinds)
    def test_query_lens_cpu_kind(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Of a host that has the lengths of queries on the device alone, each build reads all lengths, and shows it."""
        spec = draw(point)
        scene = materialize(_with_keys_alone(spec, 69))
        runner = runner_for(subject, spec, scene)
        require(runner.backend.agreement.reads_lengths, f"{subject} with {spec}: the agreement reads no lengths")
        call = runner.call(scene)
        more = {name: getattr(call.batch, name) + 3 for name in ("num_actual_tokens", "max_query_len", "max_seq_len")}
        absent: dict[str, Any] = dict.fromkeys(("query_start_loc_cpu", "seq_lens_cpu", "key_start_loc_cpu"))
        batch = with_wider_table(call.batch) if call.batch.block_table is not None else call.batch
        runner.forward(call, runner.builder.build(evolve(batch, **absent, **more)))
        runner.compare(call, scene, f"{subject} with {spec}")

    def test_threads(self, subject: Subject, draw: Draw) -> None:
        """Threads with a builder each are independent."""
        spec = draw(plain(subject))
        scenes = [materialize(spec.case(seed)) for seed in (66, 67, 68, 69)]
        backend = load_for(subject, spec, scenes[0].case)

        def work(scene: Scene) -> None:
            runner = SceneRunner(backend, scene)
            for _ in range(3):
                runner.compare(runner.run(scene).call, scene, f"{subject}: a thread among others")

        with ThreadPoolExecutor(len(scenes)) as pool:
            list(pool.map(work, scenes))

    def test_build_never_synchronizes(self, subject: Subject, draw: Draw) -> None:
        """Neither build nor forward waits for the device."""
        runner, scenes = _runner(draw, subject, 2, OF_HOSTS)
        if runner.backend.device.type != "cuda":
            pytest.skip(f"{subject}: {runner.backend.device.type} has no stream that anything could wait for")
        runner.run(scenes[0])  # compiles and loads
        call = runner.call(scenes[1])
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode does not detect every synchronization
            torch.cuda.set_sync_debug_mode("error")
        try:
            runner.forward(call, runner.builder.build(call.batch))
        except RuntimeError as error:
            raise AssertionError(f"{subject}: build or forward waits for the device: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runner.compare(call, scenes[1], f"{subject}: a step without synchronization")

    def test_build_while_a_step_runs(self, subject: Subject, draw: Draw) -> None:
        """The next step may be built while the device computes this one."""
        runner, scenes = _runner(draw, subject, 2, OF_HOSTS)
        calls = [runner.call(scene) for scene in scenes]
        first = runner.builder.build(calls[0].batch)
        if runner.backend.device.type == "cuda":
            torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]  # noqa: SLF001 - nothing else keeps a stream busy
        runner.forward(calls[0], first)
        runner.forward(calls[1], runner.builder.build(calls[1].batch))
        for call, scene in zip(calls, scenes, strict=True):
            runner.compare(call, scene, f"{subject}: a step that ran while the next one was built")


def _runner(
    draw: Draw, subject: Subject, count: int, keep: Collection[str] = (), **fields: Any
) -> tuple[SceneRunner, list[Scene]]:
    """Return a layer, and scenes of equal lengths with other tokens in other pages."""
    spec = draw(plain(subject, **fields), keep=keep)
    case = spec.case(61)
    scenes = [materialize(evolve(case, seed=61 + step)) for step in range(count)]
    return runner_for(subject, spec, scenes[0]), scenes


def _with_keys_alone(spec: RequestSpec, seed: int) -> Case:
    """Return a case in whose dense calls all rows are keys: nobody but the device knows how many there are."""
    padding: dict[str, Any] = {} if spec.fields.get("paged", True) else {"num_padding_tokens": 0}
    return spec.case(seed, **padding)


def _two_layers(first: Scene) -> tuple[Scene, Scene]:
    """Return two layers of one step: the same requests in the same pages, with all else different."""
    other = materialize(evolve(first.case, seed=first.case.seed + 1))
    slopes, rounding = first.alibi_slopes, first.rounding
    if rounding is not None:
        rounding = rounding.scaled(2, 2)
    second = evolve(
        other,
        block_table=first.block_table,
        masks=first.masks,
        scale=2 * first.scale,
        alibi_slopes=None if slopes is None else slopes / 2,
        rounding=rounding,
    )
    return first, second


def _copies(tensors: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in tensors.items() if isinstance(value, torch.Tensor)}


def _require_same(before: Mapping[str, Tensor], now: Mapping[str, Any], what: str) -> None:
    for name, tensor in before.items():
        same = torch.equal(as_bytes(tensor), as_bytes(now[name]))
        require(same, f"{what} {name}: inputs belong to the host")
