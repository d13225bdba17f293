"""Batches as hosts pass them: in any order, with bounds for exact numbers, padded requests, and calls without K/V."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import evolve

from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.serving import plain, require, runner_for, serve
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.oracle import CANARY, Paged, materialize
from attnplug_kit.oracle.padding import with_bounds, with_padded_requests
from attnplug_kit.oracle.rounding import as_bytes, paged_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnplug.contract import Batch
    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.report import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Dense

# Short queries behind the first longer one are prefills; two of them have no context, as one-token prompts have none.
_ORDERS: Final = {
    "decodes last": {"query_lens": (9, 21, 1, 1, 1), "context_lens": (0, 25, 40, 3, 0)},
    "decodes between prefills": {"query_lens": (1, 9, 1, 1, 21, 1), "context_lens": (17, 0, 40, 0, 25, 3)},
}
_PADDED: Final[Mapping[str, Callable[[Batch], Batch]]] = {
    "bounds": with_bounds,
    "padded requests": with_padded_requests,
    "bounds and padded requests": lambda batch: with_bounds(with_padded_requests(batch)),
}


def _orders(subject: Subject) -> Mapping[str, Any]:
    del subject
    return _ORDERS


def _padded(subject: Subject) -> Mapping[str, Any]:
    del subject
    return _PADDED


def _kv_in_cache(subject: Subject) -> Mapping[str, RequestSpec]:
    return field_values_of(subject).of("kv_in_cache")


class Batches(Tier):
    """What hosts may pass besides decodes that come first, exact numbers, and K/V in every call."""

    @over(_orders)
    def test_any_order(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """Decodes may come behind prefills, and between them."""
        spec = draw(plain(subject))
        if spec.fields.get("phases") == ("decode",):
            pytest.skip(f"{subject}: it serves no prefills, behind which decodes could come")
        lens = {**point, "context_lens": spec.over_pages(point["context_lens"])}
        serve(subject, spec, record, spec.case(seed=81, **lens))

    @over(_padded)
    def test_padding(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Counts may be upper bounds, and the last requests padding: neither is read, and neither is written."""
        spec = draw(plain(subject))
        scene = materialize(spec.case(seed=82))
        runner = runner_for(subject, spec, scene)
        exact, call = runner.call(scene), runner.call(scene)
        runner.forward(exact, runner.builder.build(exact.batch))
        call = evolve(call, batch=point(call.batch))
        runner.forward(call, runner.builder.build(call.batch))
        what = f"{subject} with padding"
        runner.compare(call, scene, what)
        if isinstance(call, Paged) and isinstance(exact, Paged):
            same = [
                torch.equal(_blocks(now), _blocks(was)) for now, was in zip(_pages(call), _pages(exact), strict=True)
            ]
            require(all(same), f"{what}: the KV cache differs from that of a step without")

    @over(_kv_in_cache)
    def test_calls_without_kv(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """A call without K/V reads the KV cache and writes nothing, also after one with K/V on the same metadata."""
        spec = draw(point)
        scene = materialize(spec.case(83))
        runner = runner_for(subject, spec, scene)
        call = runner.call(scene)
        metadata = runner.builder.build(call.batch)
        runner.forward(call, metadata)
        runner.compare(call, scene, f"{subject} with {spec}: a call with K/V")
        before = [_blocks(pages).clone() for pages in _pages(call)]
        slotless = runner.builder.build(evolve(call.batch, slot_mapping=None, slot_mapping_cpu=None))
        for what, built in (("", metadata), (" and slots", slotless)):
            later = _without_kv(call)
            runner.forward(later, built)
            changed = [not torch.equal(_blocks(now), was) for now, was in zip(_pages(later), before, strict=True)]
            require(not any(changed), f"{subject} with {spec}: a call without K/V{what} has written the KV cache")
            runner.compare(later, scene, f"{subject} with {spec}: a call without K/V{what}")
        record.served(runner.backend)


def _without_kv(call: Dense) -> Dense:
    """Return the same call, whose K/V are in the KV cache by now, with new outputs."""
    output, lse = (torch.full_like(rows, CANARY) for rows in (call.output, call.lse))
    return evolve(call, key=None, value=None, output=output, lse=lse)


def _pages(call: Dense) -> list[Tensor]:
    return list(paged_tensors(call.cache).values()) if isinstance(call, Paged) else []


def _blocks(pages: Tensor) -> Tensor:
    """Return the bytes of all blocks but the null block, which padding may write: NaN equals NaN among them."""
    return as_bytes(pages[1:])
