"""What a step writes into a KV cache, and where; what it reads of it, and which output rows it writes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import evolve

from attnplug.batching import num_freeable_blocks
from attnplug.contract import PAD_SLOT_ID, by_phase, is_narrow_float, torch_dtype
from attnplug_kit.conformance.drawing import OF_HOSTS
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.serving import load_for, plain, require, runner_for
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.fields import tested
from attnplug_kit.oracle import (
    CANARY,
    Paged,
    SceneRunner,
    assert_output,
    materialize,
    paged_tensors,
    untouched,
)
from attnplug_kit.oracle.rounding import as_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug.contract import LoadedBackend
    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Scene

_LONGEST_REACH: Final = 4096
"""Tokens of a window or chunk at most for which a step is made that has freed blocks."""

_OUTER: Final = {"NHD": "tokens", "HND": "heads"}


def _caches(subject: Subject) -> Mapping[str, RequestSpec]:
    specs = field_values_of(subject).of(*tested("cache"))
    wide = {f"heads outnumber slots of {layout}": _of_many_heads(subject, layout) for layout in ("NHD", "HND")}
    found = {**specs, **{name: spec for name, spec in wide.items() if spec is not None}}
    return {name: spec for name, spec in found.items() if spec.fields.get("paged")}


def _of_many_heads(subject: Subject, layout: str) -> RequestSpec | None:
    """Return a request whose blocks have more heads than slots: who takes the larger axis for the slots is wrong."""
    sizes = ((8, 4), (16, 8), (32, 16), (64, 32), (2, 1))
    specs = (
        field_values_of(subject).spec(num_kv_heads=heads, block_size=size, kv_layout=layout) for heads, size in sizes
    )
    return next((spec for spec in specs if spec is not None), None)


def _with_and_without_masks(subject: Subject) -> Mapping[str, RequestSpec]:
    declared = field_values_of(subject)
    found = {name: declared.spec(paged=True, **own) for name, own in (("plain", {}), ("mask", {"custom_mask": True}))}
    return {name: spec for name, spec in found.items() if spec is not None}


def _local(subject: Subject) -> Mapping[str, RequestSpec]:
    specs = field_values_of(subject).of("sliding_window", "attention_chunk")
    return {name: spec for name, spec in specs.items() if spec.fields.get("paged", True)}


class CacheWrites(Tier):
    """Writes go to the slots of the batch and nowhere else, and a request reads its own keys only."""

    @over(_caches)
    def test_cache_is_as_agreed(self, subject: Subject, draw: Draw, point: Any) -> None:
        """A cache has the dtype and the blocks of the agreement, and its order of tokens and heads."""
        point = draw(point, keep=OF_HOSTS)
        backend = load_for(subject, point, point.case(40))
        agreed, requirements = backend.agreement, backend.agreement.requirements
        dtypes = {"key": agreed.kv_cache_dtype, "value": agreed.kv_cache_dtype}
        if agreed.kv_cache_dtype == "int8_k":
            dtypes = {"key": "int8", "value": requirements.dtype}
        cache = backend.make_cache(3, device=backend.device)
        for name, pages in zip(("key", "value"), (cache.k, cache.v), strict=True):
            expected, what = torch_dtype(dtypes[name]), f"{subject} with {point}: the pages of {name}s"
            require(pages.dtype == expected, f"{what} are {pages.dtype}, and the agreement has {expected}")
            blocks = (3, agreed.block_size, requirements.num_kv_heads)
            found = tuple(pages.shape)
            require(found[:3] == blocks, f"{what} have the shape {found}, and the agreement has {blocks}")
            order = ("tokens", "heads") if pages.stride(1) > pages.stride(2) else ("heads", "tokens")
            same = min(pages.shape[1:3]) == 1 or order[0] == _OUTER[agreed.kv_layout or "NHD"]
            require(same, f"{what} have {' before '.join(order)} in memory, and the agreement has {agreed.kv_layout}")

    @over(_caches)
    def test_written_slots(self, subject: Subject, draw: Draw, point: Any) -> None:
        """New keys and values are written to their slots, and to no other slots."""
        point = draw(point, keep=("kv_in_cache",))
        scene = materialize(point.case(41))
        _require_written(runner_for(subject, point, scene), scene)

    @over(_caches)
    def test_slots_written_by_the_host(self, subject: Subject, draw: Draw, point: Any) -> None:
        """The same for a host that writes the cache itself, before forward, in the phases that it may write."""
        point = draw(point, keep=("kv_in_cache",))
        scene = materialize(point.case(42))
        backend = load_for(subject, point, scene.case)
        if not {"host", "either"} & set(by_phase(backend.impl_class.cache_write).values()):
            pytest.skip(f"{subject}: forward writes the cache")
        _require_written(SceneRunner(backend, scene, host_writes=True), scene)

    @over(_caches)
    def test_copied_and_swapped_blocks(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Copied and swapped blocks have the keys, values and scales of the source; other blocks stay the same."""
        point = draw(point, keep=OF_HOSTS)
        scene = materialize(point.case(46, query_lens=(5, 1, 30), context_lens=(30, 47, 0)))
        backend = load_for(subject, point, scene.case)
        cache = scene.paged(backend, backend.device, written=True).cache
        other = backend.make_cache(scene.num_blocks, device=backend.device)
        before = {name: as_bytes(pages).clone() for name, pages in paged_tensors(cache).items()}
        backend.swap_blocks(cache, other, [(1, 2), (3, 1), (2, 4)])
        backend.copy_blocks([cache], {1: [2, 3]})
        for name, was in before.items():
            now, swapped = paged_tensors(cache)[name], paged_tensors(other)[name]
            expected = was[[0, 1, 1, 1, *range(4, len(was))]]
            same = torch.equal(as_bytes(swapped)[[2, 1, 4]], was[[1, 3, 2]])
            require(same, f"{subject}: swap_blocks did not copy the {name}s of three blocks")
            same = torch.equal(as_bytes(now), expected)
            require(same, f"{subject}: after copy_blocks, a block has the wrong {name}s")
        before = {name: as_bytes(pages).clone() for name, pages in paged_tensors(cache).items()}
        backend.swap_blocks(cache, cache, [(1, 4), (4, 1)])
        for name, was in before.items():
            same = torch.equal(as_bytes(paged_tensors(cache)[name])[[1, 4]], was[[4, 1]])
            require(same, f"{subject}: two blocks that were swapped in one cache have the wrong {name}s")

    @needs(paged=True)
    def test_requests_are_independent(self, subject: Subject, draw: Draw) -> None:
        """NaN in the keys and values of one request reaches no row of another one."""
        spec = draw(plain(subject, paged=True), keep=("kv_in_cache",))
        scene = materialize(spec.case(43, shared_blocks=0))
        backend = load_for(subject, spec, scene.case)
        poisoned = evolve(scene, keys=_poison(scene.keys), values=_poison(scene.values))
        clean, ran = SceneRunner(backend, scene).run(scene), SceneRunner(backend, poisoned).run(poisoned)
        first = scene.case.query_lens[0]
        finite = bool(ran.output[first:].isfinite().all())
        require(finite, f"{subject}: NaN in the first request's cache reached rows of other requests")
        others = slice(first, None)
        assert_output(clean.output[others], scene, rows=others)
        assert_output(ran.output[others], scene, rows=others)

    def test_output_rows(self, subject: Subject, draw: Draw) -> None:
        """Rows of the batch are overwritten, whatever they held; rows beyond are not written."""
        spec = draw(plain(subject))
        scene = materialize(spec.case(44))
        runner = runner_for(subject, spec, scene)
        call = runner.call(scene)
        call.output[: scene.case.num_tokens] = torch.nan
        runner.forward(call, runner.builder.build(call.batch))
        rows, beyond = call.output[: scene.case.num_tokens], call.output[scene.case.num_tokens :]
        require(not rows.isnan().any(), f"{subject}: output rows keep what they held before: not fully overwritten")
        require(bool((beyond == CANARY).all()), f"{subject}: output rows beyond the batch's tokens were written")

    @over(_with_and_without_masks)
    def test_requests_without_tokens(self, subject: Subject, draw: Draw, point: Any) -> None:
        """
        A request without queries affects no other request: at the end, as padding, and elsewhere.

        It has no keys either, or those of earlier steps: it waits in this one.
        """
        spec = draw(point)
        lens = {"query_lens": (1, 9, 0, 0), "context_lens": spec.over_pages((30, 4, 0, 21))}
        runner = None
        for order in ((0, 1, 3, 2, 2), (2, 0, 3, 1), (3, 2, 1, 0)):
            ordered: dict[str, Any] = {name: tuple(one[n] for n in order) for name, one in lens.items()}
            scene = materialize(spec.case(45, **ordered))
            runner = runner or runner_for(subject, spec, scene)
            what = f"{subject} with {spec}: requests {order}, of which 2 and 3 have no query"
            runner.compare(runner.run(scene).call, scene, what)

    @over(_local)
    def test_freed_blocks(self, subject: Subject, draw: Draw, point: Any) -> None:
        """
        Blocks that no query attends to any more are freed: the null block is in their place.

        It holds NaN, which a weight of 0 does not remove, unless the plugin declares `needs_finite_null_block`.
        """
        point = draw(point, keep=OF_HOSTS)
        requirements = point.requirements()
        local = {name: getattr(requirements, name) for name in ("sliding_window", "attention_chunk")}
        size, reach = point.case(48).block_size, max(value or 0 for value in local.values())
        if reach > _LONGEST_REACH:
            pytest.skip(f"{subject}: with {point} no block is freed before {reach} tokens")
        context = (2 * reach + 3 * size, reach + size + 5, 3)
        scene = materialize(point.case(48, query_lens=(1, 9, 5), context_lens=context, shared_blocks=0))
        runner = runner_for(subject, point, scene)
        call = runner.call(scene)
        if not isinstance(call, Paged):
            raise TypeError("only paged calls have blocks")
        table = scene.block_table.clone()
        freed = [num_freeable_blocks(length, size, **local) for length in scene.case.context_lens]
        for row, count in zip(table, freed, strict=True):
            row[:count] = 0
        require(any(freed), f"{subject} with {point}: no block is freed, and nothing is tested")
        if runner.backend.frees_into_finite_blocks:
            for pages in (call.cache.k, call.cache.v):
                pages[0].zero_()
        given = table.to(runner.backend.device)
        call = evolve(call, batch=evolve(call.batch, block_table=given, block_table_cpu=table))
        runner.forward(call, runner.builder.build(call.batch))
        runner.compare(call, scene, f"{subject} with {point}: blocks before its reach are freed")

    @needs(paged=True)
    def test_rows_without_slots(self, subject: Subject, draw: Draw) -> None:
        """Rows whose K/V are in the cache already have no slot, wherever they are: the other rows are written."""
        spec = draw(plain(subject, paged=True), keep=("kv_in_cache",))
        scene = materialize(spec.case(47))
        runner = runner_for(subject, spec, scene)
        call = scene.paged(runner.backend, runner.backend.device, written=True)
        slots, tokens = new_slots(call, scene), scene.case.num_tokens
        kept = torch.arange(tokens) % 3 > 0
        places = slots[kept] // scene.case.block_size, slots[kept] % scene.case.block_size
        for pages in paged_tensors(call.cache).values():
            _as_integers(pages)[places] = -1  # NaN, for every float; int8 codes have a scale of NaN then
        mapping = torch.cat([slots.where(kept, PAD_SLOT_ID), call.batch.slot_mapping[tokens:].cpu()])  # type: ignore[index]
        mapping = mapping.to(runner.backend.device)
        on_cpu = mapping if runner.backend.device.type == "cpu" else None
        call = evolve(call, batch=evolve(call.batch, slot_mapping=mapping, slot_mapping_cpu=on_cpu))
        runner.forward(call, runner.builder.build(call.batch))
        runner.compare(call, scene, f"{subject} with {spec}: every third row without a slot")
        require_rows(runner.backend, scene, call, slots[kept])


def _poison(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.full_like(rows[0], torch.nan), *rows[1:])


def _require_written(runner: SceneRunner, scene: Scene) -> None:
    """Run a step, and compare every slot of the cache: with the expected new K/V, or with what it held before."""
    call, subject, tokens = runner.call(scene), runner.backend.id, scene.case.num_tokens
    if not isinstance(call, Paged):
        raise TypeError("only paged calls write a cache")
    for rows in (call.key, call.value):
        if rows is not None:
            rows[tokens:] = 3.0  # so that a write of padding shows: free slots hold NaN, as padding rows do
    before = {name: as_bytes(pages).clone() for name, pages in paged_tensors(call.cache).items()}
    runner.forward(call, runner.builder.build(call.batch))
    require(untouched(call.cache), f"{subject}: memory between the blocks was written, which belongs to the host")
    new = new_slots(call, scene)
    for name, was in before.items():
        changed = _slots(as_bytes(paged_tensors(call.cache)[name])) != _slots(was)
        _require_no_strays(changed, new, scene.case.block_size, f"{subject}: {name}s")
    require_rows(runner.backend, scene, call, new)
    runner.compare(call, scene, f"{subject}: attention over what was written")


def new_slots(call: Paged, scene: Scene) -> Tensor:
    """Return the slots of a step's tokens, on the CPU."""
    return call.batch.slot_mapping[: scene.case.num_tokens].cpu()  # type: ignore[index]


def require_rows(backend: LoadedBackend, scene: Scene, call: Paged, slots: Tensor) -> None:
    """
    Compare slots of a KV cache with what the host would have written into them.

    Raises:
        AssertionError: They differ.
    """
    expected = paged_tensors(scene.paged(backend, written=True).cache)
    for name, now in paged_tensors(call.cache).items():
        pair = _slots(now.float().cpu())[slots], _slots(expected[name].float())[slots]
        close = torch.isclose(*pair, rtol=_rtol(name, now.dtype), atol=1.0 if now.dtype == torch.int8 else 0.0)
        what = f"{int((~close).sum())} numbers of new {name}s are not in their slots"
        require(bool(close.all()), f"{backend.id}: {what}")


def _as_integers(pages: Tensor) -> Tensor:
    return pages.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[pages.itemsize])


def _require_no_strays(changed: Tensor, new: Tensor, block_size: int, what: str) -> None:
    slots = changed.flatten(1).any(1).nonzero().flatten().cpu()
    strays = [int(slot) for slot in slots if slot not in new]
    require(
        not strays,
        f"{what} were written into slot {strays[:1]} (block {[slot // block_size for slot in strays[:1]]}), which "
        "belongs to no token of the batch; rows with slot -1 are padding, and never written",
    )


def _rtol(name: str, dtype: torch.dtype) -> float:
    """Return a tolerance: a number between two others may be rounded to either, and a scale is a quotient."""
    return 2**-3 if is_narrow_float(dtype) else 2**-20 if name.endswith(" scale") else 0.0


def _slots(pages: Tensor) -> Tensor:
    return pages.flatten(0, 1)
