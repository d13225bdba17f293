"""Two ways to compute a layer are compared before their times are: a wrong one may well be fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug import AttnplugError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug_kit.bench.baseline import Baseline
    from attnplug_kit.bench.rig import Rig


def check_same(rig: Rig, baseline: Baseline, raw: Callable[[], Tensor], *ways: Callable[[], Tensor]) -> None:
    """
    Compare what the raw calls return with what each way of the backend leaves in the output.

    Args:
        rig: The step.
        baseline: Whose the raw calls are.
        raw: The raw calls.
        ways: Calls that write the rig's output, and return it.

    Raises:
        AttnplugError: A result is another one.
    """
    from attnplug_kit.oracle.closeness import assert_close  # noqa: PLC0415 - imports torch

    exact, largest = raw().cpu().double(), float(max(x.abs().amax() for x in (rig.value, *rig.past[1:]) if x.numel()))
    for way in ways:
        rig.output.fill_(float("nan"))
        try:
            assert_close(way(), exact, dtype=rig.output.dtype, scale=largest)
        except AssertionError as error:
            raise AttnplugError(
                f"{rig.planner.backend.id} was held against {baseline.what}, at {rig.step.what}",
                f"they do not compute the same: {error}",
                "correct whichever is wrong: no time is told for a wrong result",
            ) from error
