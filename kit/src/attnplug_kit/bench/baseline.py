"""The raw calls of a library: what a host would write by hand that knew one library, one layout, and no contract."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.metadata import EntryPoint

    from torch import Tensor

    from attnplug_kit.bench.rig import Planner, Rig

GROUP: Final = "attnplug.benchmarks"
"""The entry points of baselines: a backend's name, and a class that is made without arguments."""


@runtime_checkable
class Baseline(Protocol):
    """
    Raw calls that compute what a backend's `forward` computes, on the same inputs.

    A backend whose library has calls of its own brings a baseline in its distribution, under the entry point group
    `GROUP`. One that brings none is compared with torch's, and no budget holds: another library's kernels are no
    overhead.
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

        What a host prepares once per step, indices, plans and masks, is prepared here and not counted, as a build is
        not. The cache is one of its own, which holds what `Rig.cached` says.

        Args:
            rig: The step with its tensors.

        Returns:
            A function that returns ``(num_tokens, num_q_heads * head_size)``.
        """

    def captured(self, rig: Rig) -> Callable[[], Tensor]:
        """
        Return the same for a graph: everything that the calls read stays where it is.

        Args:
            rig: A step in which every request decodes.
        """

    def plans(self, planner: Planner, *, captured: bool) -> Mapping[str, Callable[[], object]]:
        """
        Return what a host calls once per step, by what it is in words; nothing where the library plans nothing.

        Args:
            planner: The step.
            captured: Whether it is planned for a graph.

        Returns:
            The library's own plan first, with arrays that are ready. What follows may prepare them besides.
        """


def baseline_of(backend: str) -> tuple[Baseline, str | None]:
    """
    Return the baseline that a backend is held against, and where it is not of its own library, why.

    Args:
        backend: The backend's name.
    """
    from attnplug_kit.bench.raw_torch import RawTorch  # noqa: PLC0415 - imports torch

    torch: Baseline = RawTorch()
    if backend == torch.backend:
        return torch, None
    found = tuple(entry_points(group=GROUP, name=backend))
    if not found:
        return torch, f"{backend} brings no raw calls as {GROUP}: it is held against {torch.what}, without a budget"
    try:
        return _load(found, backend), None
    except Exception as error:  # noqa: BLE001 - a plugin's code may raise anything
        why = f"{type(error).__name__}: {error}"
        return torch, f"the raw calls of {backend} ({found[0].value}) are held back, and {torch.what} stand in: {why}"


def _load(found: tuple[EntryPoint, ...], backend: str) -> Baseline:
    if len({one.value for one in found}) > 1:
        raise LookupError(f"{len(found)} distributions bring some: {', '.join(one.value for one in found)}")
    made = found[0].load()()
    if not isinstance(made, Baseline):
        raise TypeError(f"{type(made).__name__} is no Baseline (attnplug_kit.bench.baseline)")
    if made.backend != backend:
        raise ValueError(f"they are those of {made.backend!r}")
    return made
