"""What a step writes into a cache, and where; what it may read of it, and whose output rows it touches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import evolve

from attnplug.contract import by_phase, is_narrow_float, torch_dtype
from attnplug.ops import key_and_value_pages
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.require import require
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.conformance.serving import load_for, plain
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.oracle.byte_rounding import paged_tensors
from attnplug_kit.oracle.closeness import assert_close
from attnplug_kit.oracle.scene import CANARY, Paged, materialize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle.scene import Scene


def _caches(subject: Subject) -> Mapping[str, RequestSpec]:
    fields = ("kv_layout", "kv_cache_dtype", "block_size", "head_size_v", "per_head_scales", "dtype")
    asks = field_values_of(subject).asks.items()
    return {str(item): ask for item, ask in asks if item.field in fields and ask.fields.get("paged")}


_FIRST: Final = {"NHD": "tokens", "HND": "heads"}


class CacheWrites(Tier):
    """Writes land in the slots of the batch and nowhere else, and reads stay inside a request's own keys."""

    @over(_caches)
    def test_cache_is_as_agreed(self, subject: Subject, point: Any) -> None:
        """A cache has the agreed dtype and blocks, and the agreed order of tokens and heads in memory."""
        backend = load_for(subject, point, point.case(40))
        agreed, asked = backend.agreement, backend.agreement.requirements
        wide = {"value": asked.dtype} if agreed.kv_cache_dtype == "int8_k" else {}
        cache = backend.make_cache(3, device=backend.device)
        for name, pages in zip(("key", "value"), key_and_value_pages(cache), strict=True):
            wanted = torch_dtype(wide.get(name, "int8" if wide else agreed.kv_cache_dtype))
            what = f"{subject} with {point}: the pages of {name}s"
            require(pages.dtype == wanted, f"{what} are {pages.dtype}, and {wanted} was agreed on")
            blocks = (3, agreed.block_size, asked.num_kv_heads)
            require(
                pages.shape[:3] == blocks, f"{what} have the shape {tuple(pages.shape)}, and {blocks} was agreed on"
            )
            first = ("tokens", "heads") if pages.stride(1) > pages.stride(2) else ("heads", "tokens")
            found = min(pages.shape[1:3]) == 1 or first[0] == _FIRST[agreed.kv_layout or "NHD"]
            require(found, f"{what} were agreed to be {agreed.kv_layout}, and {' lie before '.join(first)} in memory")

    @over(_caches)
    def test_slots(self, subject: Subject, point: Any) -> None:
        """New keys and values land exactly in their slots; all other slots stay as they were."""
        scene = materialize(point.case(41))
        rig = Rig(load_for(subject, point, scene.case), scene)
        _demand_written(rig, scene)

    @over(_caches)
    def test_slots_of_a_host(self, subject: Subject, point: Any) -> None:
        """The same where the host writes the cache itself, before forward."""
        scene = materialize(point.case(42))
        backend = load_for(subject, point, scene.case)
        if not {"host", "either"} & set(by_phase(backend.impl_class.cache_write).values()):
            pytest.skip(f"{subject}: forward writes the cache")
        _demand_written(Rig(backend, scene, host_writes=True), scene)

    @over(_caches)
    def test_blocks_move(self, subject: Subject, point: Any) -> None:
        """Copied and swapped blocks take keys and values along, and leave all other blocks alone."""
        scene = materialize(point.case(46))
        backend = load_for(subject, point, scene.case)
        cache = scene.paged(backend, backend.device, written=True).cache
        other = backend.make_cache(scene.num_blocks, device=backend.device)
        before = {name: _bytes(pages).clone() for name, pages in paged_tensors(cache).items()}
        backend.swap_blocks(cache, other, [(1, 2)])
        backend.copy_blocks([cache], {1: [2, 3]})
        for name, was in before.items():
            now, moved = paged_tensors(cache)[name], paged_tensors(other)[name]
            wanted = was[[0, 1, 1, 1, *range(4, len(was))]]
            same = torch.equal(_bytes(moved)[2], was[1])
            require(same, f"{subject}: swap_blocks did not copy the {name}s of a block")
            same = torch.equal(_bytes(now), wanted)
            require(same, f"{subject}: after copy_blocks, {name}s are not where they belong")

    @needs(paged=True)
    def test_others_do_not_influence(self, subject: Subject) -> None:
        """NaN in the keys and values of one request reaches no row of another one."""
        ask = plain(subject, paged=True)
        scene = materialize(ask.case(43))
        backend = load_for(subject, ask, scene.case)
        poisoned = evolve(scene, keys=_poison(scene.keys), values=_poison(scene.values))
        clean, ran = Rig(backend, scene).run(scene), Rig(backend, poisoned).run(poisoned)
        first = scene.case.query_lens[0]
        require(
            bool(ran.output[first:].isfinite().all()),
            f"{subject}: NaN in the first request's cache reached rows of other requests",
        )
        dtype, scale = ran.output.dtype, scene.largest_value
        assert_close(ran.output[first:], clean.output[first:].double().cpu(), dtype=dtype, scale=scale)

    def test_output_rows(self, subject: Subject) -> None:
        """Rows of the batch are overwritten, whatever they held; rows beyond are not touched."""
        ask = plain(subject)
        scene = materialize(ask.case(44))
        rig = Rig(load_for(subject, ask, scene.case), scene)
        call = rig.call(scene)
        call.output[: scene.case.num_tokens] = torch.nan
        rig.forward(call, rig.builder.build(call.batch))
        rows, beyond = call.output[: scene.case.num_tokens], call.output[scene.case.num_tokens :]
        require(not rows.isnan().any(), f"{subject}: output rows keep what they held before: not fully overwritten")
        require(bool((beyond == CANARY).all()), f"{subject}: output rows beyond the batch's tokens were written")

    @needs(paged=True)
    def test_requests_without_tokens(self, subject: Subject) -> None:
        """A padded request has no query and no keys, and costs nobody anything."""
        ask = plain(subject, paged=True)
        scene = materialize(ask.case(45, query_lens=(1, 9, 0, 0), context_lens=(30, 4, 0, 0)))
        ran = Rig(load_for(subject, ask, scene.case), scene).run(scene)
        assert_close(ran.output, scene.expected().output, dtype=ran.output.dtype, scale=scene.largest_value)


def _poison(rows: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (torch.full_like(rows[0], torch.nan), *rows[1:])


def _demand_written(rig: Rig, scene: Scene) -> None:
    call = rig.call(scene)
    if not isinstance(call, Paged):
        raise TypeError("only paged calls write a cache")
    for rows in (call.key, call.value):
        if rows is not None:
            rows[scene.case.num_tokens :] = 3.0  # padding that a write would show: free slots hold NaN too
    before = {name: _bytes(pages).clone() for name, pages in paged_tensors(call.cache).items()}
    rig.forward(call, rig.builder.build(call.batch))
    new = call.batch.slot_mapping[: scene.case.num_tokens].cpu() if call.batch.slot_mapping is not None else None
    wanted = scene.paged(rig.backend, written=True)
    subject = rig.backend.id
    for name, was in before.items():
        now, right = paged_tensors(call.cache)[name], paged_tensors(wanted.cache)[name]
        changed = _slots(_bytes(now)) != _slots(was)
        slots = changed.flatten(1).any(1).nonzero().flatten().cpu()
        size = scene.case.block_size
        strays = [int(slot) for slot in slots if new is None or slot not in new]
        require(
            not strays,
            f"{subject}: {name}s were written into slot {strays[:1]} (block {[s // size for s in strays[:1]]}), which "
            "belongs to no token of the batch; rows with slot -1 are padding, and never written",
        )
        mine, theirs = now.float().cpu(), right.float()
        flat = (_slots(mine)[new], _slots(theirs)[new])
        close = torch.isclose(*flat, rtol=_rtol(name, now.dtype), atol=1.0 if now.dtype == torch.int8 else 0.0)
        require(bool(close.all()), f"{subject}: {int((~close).sum())} numbers of new {name}s are not in their slots")


def _rtol(name: str, dtype: torch.dtype) -> float:
    """A number that lies between two others may be rounded to either; a scale is the quotient of a division."""
    return 2**-3 if is_narrow_float(dtype) else 2**-20 if name == "key scale" else 0.0


def _bytes(pages: Tensor) -> Tensor:
    """NaN differs from itself: bytes do not."""
    return pages.contiguous().view(torch.uint8)


def _slots(pages: Tensor) -> Tensor:
    return pages.flatten(0, 1)
