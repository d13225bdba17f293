"""The LSE: its base, whether it includes the sink, and whether partial outputs merge by it."""

from __future__ import annotations

from math import e, log2
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

from attnplug.ops import merge_attention_states
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.serving import plain, require, runner_for
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.oracle import CANARY, assert_close, assert_output, materialize, tolerance
from attnplug_kit.oracle.attention import FULL_PATTERN

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import RunResult, Scene


def _dtypes(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return a request with an LSE for each dtype of half precision."""
    declared = field_values_of(subject)
    halves = [name for name in declared.values()["dtype"] if name != "float32"]
    found = {name: declared.spec(return_lse=True, dtype=name) for name in halves}
    return {name: spec for name, spec in found.items() if spec is not None}


def _kinds(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return a plain request with an LSE, and those for latents and for selected ones, whose kernels are others."""
    declared = field_values_of(subject)
    specs = {"plain": declared.spec(return_lse=True), "latent": declared.spec(return_lse=True, latent=True)}
    for topk in declared.values().get("topk", ())[:1]:
        specs["topk"] = declared.spec(return_lse=True, topk=topk)
    return {name: spec for name, spec in specs.items() if spec is not None}


class LogSumExp(Tier):
    """The natural log-sum-exp of the scaled scores, in float32, one for each token and query head."""

    @over(_kinds)
    def test_base(self, subject: Subject, draw: Draw, point: Any) -> None:
        """The LSE is a natural logarithm."""
        ran, scene = _run(subject, draw(point))
        exact = scene.expected().lse
        require(
            not _near(ran, exact * log2(e)),
            f"{subject}: the LSE is a logarithm to base 2, and the contract's is natural: multiply it by ln 2",
        )
        _compare(ran, scene, exact)

    @over(_kinds)
    def test_rows(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Each token of the batch has an LSE; rows beyond are not written."""
        for seed in (51, 55, 56):  # decodes are not first in every order
            ran, scene = _run(subject, draw(point), seed)
            require(bool((ran.lse != CANARY).all()), f"{subject}: rows of the LSE are not written")
            beyond = ran.call.lse[scene.case.num_tokens :]
            is_kept = bool((beyond == CANARY).all())
            require(is_kept, f"{subject}: rows of the LSE beyond the batch's tokens were written")

    @needs(return_lse=True, sinks=True)
    def test_sink_is_counted_as_declared(self, subject: Subject, draw: Draw) -> None:
        """The LSE includes the sink if `lse_includes_sink` is true, and only then."""
        ran, scene = _run(subject, draw(plain(subject, return_lse=True, sinks=True)))
        includes, exact = _includes_sink(subject), scene.expected()
        expected, other = (exact.lse_with_sink, exact.lse) if includes else (exact.lse, exact.lse_with_sink)
        found = "does not include it" if includes else "includes it"
        require(not _near(ran, other), f"{subject}: lse_includes_sink is {includes}, and the LSE {found}")
        _compare(ran, scene, expected)

    @over(_dtypes)
    def test_precision(self, subject: Subject, draw: Draw, point: Any) -> None:
        """The LSE is a float32 sum in layers of half precision too: it is not rounded to their dtype."""
        spec = draw(point)
        scene = materialize(spec.case(53))
        ran = runner_for(subject, spec, scene).run(scene)
        rounded = ran.lse.to(ran.output.dtype).float()
        require(not torch.equal(ran.lse, rounded), f"{subject} with {spec}: the LSE is rounded to {ran.output.dtype}")

    @over(_kinds)
    def test_merge(self, subject: Subject, draw: Draw, point: Any) -> None:
        """Partial outputs over two parts of the keys merge to attention over all of them."""
        _require_merged(subject, draw, point)

    @needs(return_lse=True, sinks=True)
    def test_merge_with_sink(self, subject: Subject, draw: Draw) -> None:
        """A sink in one of two parts is counted once in the merged output."""
        if not _includes_sink(subject):
            pytest.skip(f"{subject}: its LSE does not include the sink, so that only the host can merge it in")
        _require_merged(subject, draw, plain(subject, return_lse=True, sinks=True), sinks=True)


def _run(subject: Subject, spec: RequestSpec, seed: int = 51) -> tuple[RunResult, Scene]:
    scene = materialize(spec.case(seed))
    return runner_for(subject, spec, scene).run(scene), scene


def _compare(ran: RunResult, scene: Scene, exact: Tensor) -> None:
    scaled = scene.rounding is not None
    assert_close(ran.lse, exact, dtype=ran.output.dtype, what="lse", scaled_keys=scaled)


def _near(ran: RunResult, lse: Tensor) -> bool:
    limit = tolerance(ran.output.dtype).lse
    return bool(torch.isclose(ran.lse.double().cpu(), lse, atol=limit, rtol=limit).all())


def _includes_sink(subject: Subject) -> bool:
    backend = subject.load(plain(subject, return_lse=True, sinks=True).requirements())  # type: ignore[arg-type]
    return bool(backend.impl_class.lse_includes_sink)


def _require_merged(subject: Subject, draw: Draw, spec: RequestSpec, **fields: Any) -> None:
    # A block-sparse pattern over a part of the keys is another pattern: only the full one can be split.
    if spec.fields.get("block_sparse"):
        spec = plain(subject, return_lse=True, block_sparse=tuple(sorted(FULL_PATTERN.items())), **fields)
    whole_keys: dict[str, Any] = {"shared_blocks": 0, "score_shift": 0.0}
    spec = draw(spec)
    lens: dict[str, Any] = {"query_lens": (1, 1), "context_lens": spec.over_pages((40, 17))}
    whole = materialize(spec.case(52, **lens, **whole_keys))
    states, cut = [], 9
    without = spec.evolve(**dict.fromkeys(fields))
    for each, own, part in ((without, {}, slice(None, cut)), (spec, fields, slice(cut, None))):
        scene = _part(whole, part, sinks="sinks" in own)
        ran = runner_for(subject, each, scene).run(scene)
        states += [ran.output.float().cpu(), ran.lse.cpu()]
    output, lse = merge_attention_states(*states, sink_in_b="sinks" in fields)
    exact, dtype = whole.expected(), whole.queries[0].dtype
    try:
        assert_output(output.to(dtype), whole, wider=2.0)
        assert_close(lse, exact.lse_with_sink, dtype=dtype, what="lse", scaled_keys=whole.rounding is not None)
    except AssertionError as error:
        raise AssertionError(f"{subject}: two parts of the keys do not merge to the whole: {error}") from error


def _part(whole: Scene, part: slice, *, sinks: bool) -> Scene:
    """Return the same queries over some of the keys. The queries are decodes: they attend to all of these keys."""
    keys = tuple(rows[part] for rows in whole.keys)
    lens = tuple(len(rows) - 1 for rows in keys)
    made = materialize(evolve(whole.case, context_lens=lens, sinks=sinks))
    values = tuple(rows[part] for rows in whole.values)
    masks = None if whole.masks is None else tuple(mask[:, part] for mask in whole.masks)
    return evolve(
        made, queries=whole.queries, keys=keys, values=values, masks=masks, sinks=whole.sinks if sinks else None
    )
