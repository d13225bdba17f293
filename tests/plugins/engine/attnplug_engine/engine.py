"""An engine that has one backend for the CPU, and knows no sinks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.engines import EngineAnswer, EngineBackend, EngineChoice, EngineDiagnosis

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug import Device, Requirements


def choose(requirements: Sequence[Requirements], device: Device, *, assume_installed: bool) -> EngineAnswer:
    """Choose the toy kernels of attnplug-good on the CPU, for whatever has no sinks."""
    choices = []
    for each in requirements:
        reasons = ["it has no sinks"] * each.sinks + ["it runs on the CPU"] * (device.type != "cpu")
        backend = EngineBackend("TOY", reasons, "toy attention", ["good/default"])
        choices.append(
            EngineChoice(None if reasons else "TOY", [backend], ["block_size"] * (each.block_size is not None))
        )
    return EngineAnswer("Acme 2.1", choices, ["a toy that is not installed"] * assume_installed)


def diagnose(*, load: bool) -> EngineDiagnosis:
    """Return that all is well."""
    return EngineDiagnosis([f"Acme 2.1 {'has started' if load else 'is installed'}"])
