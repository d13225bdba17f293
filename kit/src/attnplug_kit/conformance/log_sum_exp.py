"""The LSE: its base, what it counts, and whether two of them merge."""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING, Any

import pytest
import torch
from attrs import evolve

from attnplug.ops import merge_attention_states
from attnplug_kit.conformance.require import require
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.conformance.serving import load_for, plain
from attnplug_kit.conformance.tier import Tier, needs
from attnplug_kit.oracle.closeness import assert_close, tolerance
from attnplug_kit.oracle.scene import CANARY, materialize
from attnplug_kit.oracle.sparsity import EVERYTHING

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle.running import RunResult
    from attnplug_kit.oracle.scene import Scene

_E = 2.718281828459045


class LogSumExp(Tier):
    """The natural log-sum-exp of the scaled scores, in float32, one for each token and query head."""

    @needs(return_lse=True)
    def test_base(self, subject: Subject) -> None:
        """The LSE is a natural logarithm."""
        ran, scene = _run(subject, return_lse=True)
        exact = scene.expected().lse
        require(
            not _near(ran, exact * log2(_E)),
            f"{subject}: the LSE is a logarithm to base 2, and the contract's is natural: multiply it by ln 2",
        )
        assert_close(ran.lse, exact, dtype=ran.output.dtype, what="lse")

    @needs(return_lse=True)
    def test_rows(self, subject: Subject) -> None:
        """Each token of the batch has its LSE; rows beyond are not touched."""
        ran, scene = _run(subject, return_lse=True)
        require(bool((ran.lse != CANARY).all()), f"{subject}: rows of the LSE are not written")
        beyond = ran.call.lse[scene.case.num_tokens :]
        require(bool((beyond == CANARY).all()), f"{subject}: rows of the LSE beyond the batch's tokens were written")

    @needs(return_lse=True, sinks=True)
    def test_sink_is_counted_as_declared(self, subject: Subject) -> None:
        """Whether the LSE counts the sink is as `lse_includes_sink` says."""
        ran, scene = _run(subject, return_lse=True, sinks=True)
        counts = _counts_sink(subject)
        exact = scene.expected()
        wanted, other = (exact.lse_with_sink, exact.lse) if counts else (exact.lse, exact.lse_with_sink)
        require(
            not _near(ran, other),
            f"{subject}: lse_includes_sink is {counts}, and the LSE {'leaves the sink out' if counts else 'counts it'}",
        )
        assert_close(ran.lse, wanted, dtype=ran.output.dtype, what="lse")

    @needs(return_lse=True)
    def test_merge(self, subject: Subject) -> None:
        """Attention over two parts of the keys merges to attention over all of them."""
        _demand_merged(subject)

    @needs(return_lse=True, sinks=True)
    def test_merge_with_sink(self, subject: Subject) -> None:
        """A sink that enters one of two parts enters their merger once."""
        if not _counts_sink(subject):
            pytest.skip(f"{subject}: its LSE leaves the sink out, so that only the host can merge it in")
        _demand_merged(subject, sinks=True)


def _run(subject: Subject, **fields: Any) -> tuple[RunResult, Scene]:
    ask = plain(subject, **fields)
    scene = materialize(ask.case(51))
    return Rig(load_for(subject, ask, scene.case), scene).run(scene), scene


def _near(ran: RunResult, lse: Tensor) -> bool:
    limit = tolerance(ran.output.dtype).lse
    return bool(torch.isclose(ran.lse.double().cpu(), lse, atol=limit, rtol=limit).all())


def _counts_sink(subject: Subject) -> bool:
    backend = subject.load(plain(subject, return_lse=True, sinks=True).requirements())  # type: ignore[arg-type]
    return bool(backend.impl_class.lse_includes_sink)


def _demand_merged(subject: Subject, **fields: Any) -> None:
    # The pattern of a part of the keys is no part of the pattern.
    base: dict[str, Any] = {"return_lse": True}
    if plain(subject, **base).fields.get("block_sparse"):
        base["block_sparse"] = tuple(sorted(EVERYTHING.items()))
    whole = materialize(plain(subject, **base, **fields).case(52, query_lens=(1, 1), context_lens=(40, 17)))
    states, cut = [], 9
    for asked, part in (({}, slice(None, cut)), (fields, slice(cut, None))):
        ask = plain(subject, **base, **asked)
        scene = _part(whole, part, sinks="sinks" in asked)
        ran = Rig(load_for(subject, ask, scene.case), scene).run(scene)
        states += [ran.output.float().cpu(), ran.lse.cpu()]
    output, lse = merge_attention_states(*states, sink_in_b="sinks" in fields)
    exact, dtype = whole.expected(), whole.queries[0].dtype
    try:
        assert_close(output, exact.output, dtype=dtype, scale=2 * whole.largest_value)
        assert_close(lse, exact.lse_with_sink, dtype=dtype, what="lse", scale=2)
    except AssertionError as error:
        raise AssertionError(f"{subject}: two parts of the keys do not merge to the whole: {error}") from error


def _part(whole: Scene, part: slice, *, sinks: bool) -> Scene:
    """The same queries over some of the keys. Decodes see all keys up to their own, which is the last."""
    keys = tuple(rows[part] for rows in whole.keys)
    lens = tuple(len(rows) - 1 for rows in keys)
    made = materialize(evolve(whole.case, context_lens=lens, sinks=sinks))
    values = tuple(rows[part] for rows in whole.values)
    return evolve(made, queries=whole.queries, keys=keys, values=values, sinks=whole.sinks if sinks else None)
