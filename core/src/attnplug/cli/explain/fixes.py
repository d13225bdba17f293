"""The fix of a verdict as a user of the command line applies it: a command to copy, or options to add."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import evolve

from attnplug.cli.explain.request import option_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.negotiation.reason import Fix
    from attnplug.request.device import Device


def steps_of(fix: Fix) -> Iterator[str]:
    """Yield the steps of a fix: a command, options to add, or the device that the candidate needs."""
    if not fix.possible:
        yield from fix.steps()
        return
    if fix.device is not None:
        yield f"none on this device; it supports this with {' '.join(_elsewhere(fix, fix.device))}"
        return
    yield from evolve(fix, engine={}).steps()
    if fix.engine:
        yield f"request it with {' '.join(_options(fix.engine))}"


def _elsewhere(fix: Fix, device: Device) -> Iterator[str]:
    yield from _options(fix.engine)
    yield f"--device {device_text(device)}"


def _options(changes: Mapping[str, Any]) -> Iterator[str]:
    for name, value in changes.items():
        option = option_of(name)
        if value is None:
            yield f"no {option}"
        elif isinstance(value, bool):
            yield option if value else f"--no-{option.removeprefix('--')}"
        else:
            yield f"{option} {shlex.quote(_written(value))}"


def _written(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def device_text(device: Device) -> str:
    """Return the text that `Device.parse` reads, without the product's name."""
    if device.compute_capability is not None:
        return f"{device.type}:{device.compute_capability}"
    if device.vendor == "amd":
        return f"rocm:{device.arch}" if device.arch else "rocm"
    return f"cuda:{device.vendor}" if device.type == "cuda" else device.type
