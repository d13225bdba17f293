"""Compares a host's limits and ranks with themselves and with the agreement."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.errors import LimitsError
from attnplug.request.fields import GRAPH_LEVELS

if TYPE_CHECKING:
    from attnplug.contract.inputs.limits import Limits, Parallel
    from attnplug.negotiation.agreement import Agreement


def check_limits(limits: Limits, parallel: Parallel, agreement: Agreement, *, supports_splits: bool) -> None:
    """
    Check that limits and ranks fit the agreement.

    Raises:
        LimitsError: They do not.
    """
    _check_graphs(limits, agreement)
    if limits.max_num_splits is not None and not supports_splits:
        raise LimitsError(
            f"max_num_splits={limits.max_num_splits} was given in the limits",
            f"{agreement.id} takes no such bound: its kernels decide how many pieces a request's keys are cut into",
            "leave max_num_splits out, or select a backend that keeps it",
        )
    asked = agreement.requirements
    if limits.batch_invariant and not asked.batch_invariant:
        raise LimitsError(
            "batch_invariant=True was given in the limits",
            "batch_invariant was not asked for, so the chosen backend may not offer it",
            "select again with batch_invariant=True, or leave it out of the limits",
        )
    if parallel.dcp_size != asked.dcp_size:
        raise LimitsError(
            f"dcp_size={parallel.dcp_size} was given in Parallel",
            f"dcp_size={asked.dcp_size} was negotiated",
            f"select again with dcp_size={parallel.dcp_size}, or pass Parallel(dcp_size={asked.dcp_size}, ...)",
        )


def _check_graphs(limits: Limits, agreement: Agreement) -> None:
    agreed = agreement.cudagraph
    if limits.cudagraph is not None and GRAPH_LEVELS.index(limits.cudagraph) > GRAPH_LEVELS.index(agreed):
        raise LimitsError(
            f"cudagraph={limits.cudagraph!r} was given in the limits",
            f"{agreement.id} captures up to {agreed!r}",
            f"select again with cudagraph={limits.cudagraph!r}, or pass a level up to {agreed!r}",
        )
    if limits.capture_sizes and agreed == "never":
        raise LimitsError(
            f"capture_sizes={limits.capture_sizes} were given",
            f"{agreement.id} runs without CUDA graphs in this agreement",
            "select again with the cudagraph level that you need, or leave capture_sizes out",
        )
