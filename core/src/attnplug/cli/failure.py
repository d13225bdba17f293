"""An error of this project, as the command line tells it: three lines for a person, an object for a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.cli.output import complain, say_json
from attnplug.errors import AttnplugError

if TYPE_CHECKING:
    from collections.abc import Mapping


def report(error: AttnplugError, *, as_json: bool) -> None:
    """Write an error: to standard error, and as JSON to standard output too where JSON was asked for."""
    if as_json:
        say_json({"error": describe(error)})
    if _is_strict():
        import traceback  # noqa: PLC0415 - for plugin authors, on request

        traceback.print_exception(error)
    else:
        complain(str(error) if error.given.startswith("attnplug ") else f"attnplug: {error}")


def describe(error: AttnplugError) -> Mapping[str, Any]:
    """Return an error as plain JSON values."""
    place = {name: value for name in ("path", "line") if (value := getattr(error, name, None))}
    sentences = {"given": error.given, "allowed": error.allowed, "remedy": error.remedy}
    return {"type": type(error).__name__, **sentences, **place}


def _is_strict() -> bool:
    """Read the strict setting once more: what is reported may be a setting that does not parse."""
    from attnplug.request.settings import Settings  # noqa: PLC0415 - only errors come by here

    try:
        return Settings.read().strict
    except AttnplugError:
        return False
