"""Declared values that no run of the conformance kit has exercised, and the command that exercises them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.request import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_ANY: Final = "any value"
_OTHER_DEVICE: Final = "the device "
"""What every reason has that another device removes."""


@frozen
class Unexercised:
    """
    One declared value that no passed test has exercised.

    Attributes:
        variant: ``backend/variant``.
        field: The field; empty where no run is known at all.
        value: The value.
        where: The device that exercises it, in words; empty where any of the declared ones does.
        command: The command that exercises it there; empty where the kit cannot.
        because: Why no test has, or why the kit cannot; may be empty.
    """

    variant: str
    field: str
    value: Any
    where: str
    command: str
    because: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain = {name: getattr(self, name) for name in ("variant", "field", "where", "command", "because")}
        return {**plain, "value": self.value if type(self.value) in (int, float, bool) else _text(self.value)}


def command_of(variant: str, features: Sequence[str] = (), device_type: str = "") -> str:
    """
    Return the command that runs the kit.

    Args:
        variant: ``backend/variant``.
        features: The open features of every request.
        device_type: The type of the device; the kit itself finds every other than the CPU.
    """
    words = ["pytest", "--pyargs", "attnplug_kit", f"--attn-backend={variant}"]
    words += ["--attn-device=cpu"] if device_type == "cpu" else []
    words += [f"--attn-feature={name}" for name in features]
    return shlex.join([*words, "--attn-report=report"])


def unexercised(
    variant: str,
    field: str,
    value: Any,
    because: str = "",
    *,
    features: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
) -> Unexercised:
    """
    Return a declared value that was not exercised, with how to exercise it.

    Args:
        variant: ``backend/variant``.
        field: The field.
        value: The value.
        because: Why the kit could not exercise it; empty where a whole run does.
        features: The open features of every request of the run.
        facts: What is known of the device that exercises the value of a field of devices, besides this value.
    """
    kind = FIELDS[field].kind if field in FIELDS else "model"
    if kind == "device":
        there = {**(facts or {}), field: value}
        on_type = str(there.get("device_type", ""))
        return Unexercised(variant, field, value, device_of(there), command_of(variant, features, on_type))
    if field == "features":
        names = value if isinstance(value, tuple) else (value,)
        return Unexercised(variant, field, value, "", command_of(variant, sorted({*features, *names})), because)
    if because and _OTHER_DEVICE not in because:
        return Unexercised(variant, field, value, "", "", because)
    where = "a device that serves it" if because else ""
    return Unexercised(variant, field, value, where, command_of(variant, features), because)


def device_of(facts: Mapping[str, Any]) -> str:
    """Return a device in words, by what is known of it."""
    kind, capability = facts.get("device_type", ""), facts.get("compute_capability")
    known = {"vendor": "from {}", "num_multiprocessors": "with {} multiprocessors", "device_name": "called {}"}
    words = [
        {"cpu": "a CPU", "cuda": "a CUDA device", "": "a device"}.get(kind, f"a {kind} device"),
        f"of compute capability {capability}" if capability is not None else "",
        *(text.format(facts[name]) for name, text in known.items() if facts.get(name) is not None),
    ]
    return " ".join(filter(None, words))


def lines_of(items: Iterable[Unexercised]) -> Iterator[str]:
    """Yield the values that one command exercises in one line, and the command in the next, to be copied."""
    groups: dict[tuple[str, str, str], list[Unexercised]] = {}
    for item in items:
        groups.setdefault((item.where, item.command, item.because), []).append(item)
    for (where, command, because), members in groups.items():
        why, on = f" ({because})" if because else "", f", on {where}" if where else ""
        yield f"{_listed(members)}{why}{on}{':' if command else ''}"
        if command:
            yield f"  {command}"


def _listed(items: Iterable[Unexercised]) -> str:
    """Return values field by field, as ``head_size=40, 64; sinks=True``."""
    by_field: dict[str, list[str]] = {}
    for item in items:
        by_field.setdefault(item.field, []).append(_text(item.value))
    return "; ".join(
        f"{name}={', '.join(dict.fromkeys(values))}" if name else _ANY for name, values in by_field.items()
    )


def _text(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
