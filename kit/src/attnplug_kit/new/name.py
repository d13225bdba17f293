"""The name of a new backend, and the names that follow from it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from attrs import frozen

from attnplug.errors import RequestError
from attnplug.negotiation import AUTO
from attnplug.request import near
from attnplug_kit.check.names import taken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from attnplug_kit.check.names import Taken

_VALID: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_PREFIX: Final = re.compile(r"^attnplug_")


@frozen
class Name:
    """
    A name that nobody has.

    Attributes:
        name: The backend's, such as ``"flash_attn"``.
    """

    name: str

    @property
    def distribution(self) -> str:
        """What pip installs, in the one spelling of PEP 503."""
        return f"attnplug-{self.name.replace('_', '-')}"

    @property
    def package(self) -> str:
        """What Python imports."""
        return f"attnplug_{self.name}"

    @property
    def class_prefix(self) -> str:
        """How its classes begin."""
        return "".join(word.capitalize() for word in self.name.split("_"))


def new_name(text: str) -> tuple[Name, str]:
    """
    Return the name, and the name of another backend that it could be mistaken for, or an empty text.

    Raises:
        RequestError: It is no name of a backend, or somebody has it.
    """
    _check_form(text)
    others = taken()
    _check_free(text, others)
    alike = near(text, tuple(each.name for each in others))
    return Name(text), alike.partition("'")[2].partition("'")[0]


def _check_form(text: str) -> None:
    if _VALID.fullmatch(text) and text != AUTO and not _PREFIX.match(text):
        return
    meant = _PREFIX.sub("", re.sub(r"[^a-z0-9]+", "_", text.lower())).strip("_")
    offered = _VALID.fullmatch(meant) and meant != AUTO
    raise RequestError(
        f"the name {text!r} was given",
        "it has small letters, digits and single underscores, begins with a letter, and has no attnplug in front; "
        f"{AUTO!r} means any backend",
        f"attnplug new {meant}" if offered else "choose another name, such as acme",
    )


def _check_free(text: str, others: Iterable[Taken]) -> None:
    for other in others:
        if text in (other.name, *other.aliases):
            raise RequestError(
                f"the name {text!r} was given",
                f"that is {'an alias of ' * (text != other.name)}{other}; a name belongs to one distribution",
                "choose another name",
            )
