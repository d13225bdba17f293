"""The raw calls of a library: what a host would write by hand that knew one library, one layout, and no contract."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug.cli.bench.rig import Rig


class Baseline(Protocol):
    """
    Raw calls that compute what a backend's `forward` computes, on the same inputs.

    A backend whose library has calls of its own gets a baseline here: a module, and a line in `baseline_of`. Until then
    it is compared with torch's, and no budget holds: another library's kernels are no overhead.
    """

    @property
    def backend(self) -> str:
        """The backend whose library it calls."""

    @property
    def what(self) -> str:
        """The calls, in words."""

    def layer(self, rig: Rig) -> Callable[[], Tensor]:
        """
        Return the calls of one layer in one step: the cache write, and attention.

        What a host prepares once per step, indices and masks, is prepared here and not counted, as a build is not. The
        cache is one of its own, which holds what `Rig.cached` says.

        Args:
            rig: The step with its tensors.

        Returns:
            A function that returns ``(num_tokens, num_q_heads * head_size)``.
        """


def baseline_of(backend: str) -> Baseline:
    """Return the baseline that a backend is held against."""
    from attnplug.cli.bench.raw_torch import RawTorch  # noqa: PLC0415 - imports torch

    del backend  # each is held against torch so far
    return RawTorch()
