"""What is known of backends that may be absent: names, how to get them, and which of them is measured to be faster."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from attrs import frozen

from attnplug.errors import ManifestError
from attnplug.manifest.supports import parse_conditions
from attnplug.negotiation.ranking import DefaultOrder
from attnplug.request.toml import parse_toml

UNPUBLISHED: Final = "known, not published yet"
_FILE: Final = Path(__file__).with_name("known.toml")


@frozen
class KnownPlugin:
    """
    A plugin that is known by name.

    Attributes:
        name: The backend's name.
        aliases: What hosts call it.
        summary: One line about it.
        install: The distribution, as pip takes it.
        published: Whether the package index has it. What is not there is no fix.
    """

    name: str
    aliases: tuple[str, ...]
    summary: str
    install: str
    published: bool = False


@frozen
class Known:
    """Known plugins, and the default orders."""

    plugins: tuple[KnownPlugin, ...] = ()
    orders: tuple[DefaultOrder, ...] = ()


@lru_cache(maxsize=1)
def read_known() -> Known:
    """Return the content of ``known.toml``."""
    return parse_known(_FILE.read_text(encoding="utf-8"))


def parse_known(text: str) -> Known:
    """
    Parse the text of such a file.

    Raises:
        ManifestError: A condition is about an unknown field, or its value is not allowed.
        ValueError: It is not TOML.
        KeyError: A key is missing.
    """
    data = parse_toml(text)
    plugins = tuple(
        KnownPlugin(name, tuple(table["aliases"]), table["summary"], table["install"], table.get("published", False))
        for name, table in sorted(data.get("plugins", {}).items())
    )
    orders = tuple(
        DefaultOrder(
            parse_conditions(_fail, table["when"], ("order", i, "when")), tuple(table["order"]), table["because"]
        )
        for i, table in enumerate(data.get("order", []))
    )
    return Known(plugins, orders)


def _fail(_: object, given: str, expected: str, fix: str) -> ManifestError:
    return ManifestError(given, expected, fix, str(_FILE))
