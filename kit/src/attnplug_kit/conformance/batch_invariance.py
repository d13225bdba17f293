"""Requests alone and in company: where batch invariance is declared, each has the same bits in every batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug.contract import Limits
from attnplug_kit.conformance.require import require
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.conformance.serving import load_for
from attnplug_kit.oracle.scene import materialize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle.scene import Scene

# Tokens of this step, and tokens before it. Long ones are what kernels split, by how much else there is to do.
_DECODES: Final = ((1, 30), (1, 1100), (1, 64))
_PREFILLS: Final = ((12, 7), (140, 600))
_STRANGERS: Final = tuple((1, 7 * number % 50) for number in range(37))
_LIMITS: Final = Limits(max_num_reqs=48, max_num_tokens=1024, max_seq_len=2048)  # an engine's do not change either


def require_same_bits(subject: Subject, ask: RequestSpec, seed: int) -> None:
    """
    Demand that requests have the same bits alone, among few others and many, and wherever they stand.

    Raises:
        AssertionError: They do not; with the request and the batch.
    """
    phases = ask.fields.get("phases", ("prefill", "decode"))
    decodes, prefills = _DECODES * ("decode" in phases), _PREFILLS * ("prefill" in phases)
    strangers = _STRANGERS * ("decode" in phases)
    query_lens, context_lens = zip(*decodes, *prefills, *strangers, strict=True)
    whole = materialize(ask.case(seed, query_lens=query_lens, context_lens=context_lens))
    rig = Rig(load_for(subject, ask, whole.case), whole, limits=_LIMITS)
    watched = len(decodes) + len(prefills)
    alone = {member: _bits(rig, _batch(whole, [member]))[0] for member in range(watched)}
    for where, members in _batches(len(decodes), len(prefills), len(strangers)).items():
        for member, bits in zip(members, _bits(rig, _batch(whole, members)), strict=True):
            same = member not in alone or torch.equal(bits, alone[member])
            which = f"request {member} ({query_lens[member]} new tokens, {context_lens[member]} before)"
            require(
                same,
                f"{subject} with {ask}: batch_invariant is declared, and {which} has other bits {where} than alone",
            )


def _batches(decodes: int, prefills: int, strangers: int) -> Mapping[str, Sequence[int]]:
    """The members of each batch, decodes first, by how its place is called."""
    first, then = range(decodes), range(decodes, decodes + prefills)
    many = range(decodes + prefills, decodes + prefills + strangers)
    return {
        "among few others": (*first, *then),
        "in another order": (*reversed(first), *reversed(then)),
        "before many others": (*first, *many, *then),
        "behind many others": (*many, *first, *then),
    }


def _batch(whole: Scene, members: Sequence[int]) -> Scene:
    """Some of the requests, with their tokens, in pages of their own."""
    case = whole.case
    lens: dict[str, Any] = {
        name: tuple(getattr(case, name)[member] for member in members) for name in ("query_lens", "context_lens")
    }
    made = materialize(evolve(case, **lens))
    rows: dict[str, Any] = {
        name: tuple(getattr(whole, name)[member] for member in members) for name in ("queries", "keys", "values")
    }
    return evolve(made, rounding=whole.rounding, byte_rounding=whole.byte_rounding, **rows)


def _bits(rig: Rig, scene: Scene) -> tuple[Tensor, ...]:
    """Run a batch, and return the output of each request with its LSE behind it."""
    ran = rig.run(scene)
    return torch.split(torch.cat([ran.output.float(), ran.lse.unsqueeze(-1)], -1), list(scene.case.query_lens))
