"""What is checked of every table of a manifest: that keys are known, and values of the form that is expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from attrs import frozen

from attnplug.errors import ManifestError
from attnplug.manifest.locate import locate
from attnplug.request.fields import near

_T = TypeVar("_T")


@frozen
class Checks:
    """
    The small checks that keep every complaint in one form. They carry the text and the path, so that it has its line.

    Attributes:
        text: The document.
        path: The file that it is from.
    """

    text: str
    path: str

    def fail(self, where: tuple[str | int, ...], given: str, allowed: str, remedy: str) -> ManifestError:
        """Return the error about a place."""
        return ManifestError(given, allowed, remedy, self.path, locate(self.text, where))

    def check(self, holds: object, where: tuple[str | int, ...], given: str, allowed: str, remedy: str) -> None:
        """Complain about a place unless something holds."""
        if not holds:
            raise self.fail(where, given, allowed, remedy)

    def keys(self, data: Mapping[str, Any], where: tuple[str | int, ...], known: tuple[str, ...]) -> None:
        """Complain about keys that a table does not have."""
        for key in data:
            if key not in known:  # looking for a near name takes longer than reading the whole manifest
                place = ".".join(map(str, where)) or "the manifest"
                raise self.fail(
                    (*where, key),
                    f"the key {key!r} in {place}{near(key, known)}",
                    f"the keys are {', '.join(known)}",
                    "correct or remove it",
                )

    def table(
        self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...], known: tuple[str, ...] = ()
    ) -> Mapping[str, Any]:
        """Return a table inside another; an empty one where it is left out."""
        empty: Mapping[str, Any] = {}
        found = self.typed(data, key, where, empty, lambda v: isinstance(v, Mapping), "a table")
        if known:
            self.keys(found, (*where, key), known)
        return found

    def tables(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> list[Mapping[str, Any]]:
        """Return an array of tables; an empty one where it is left out."""
        return self.typed(
            data,
            key,
            where,
            [],
            lambda v: isinstance(v, list) and all(isinstance(i, Mapping) for i in v),
            f"a list of tables [[{key}]]",
        )

    def texts(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> tuple[str, ...]:
        """Return a list of texts; an empty one where it is left out."""
        return tuple(
            self.typed(
                data,
                key,
                where,
                [],
                lambda v: isinstance(v, list) and all(isinstance(i, str) and i for i in v),
                "a list of texts",
            )
        )

    def text_of(self, data: Mapping[str, Any], key: str, where: tuple[str | int, ...]) -> str:
        """Return a text that has to be there."""
        self.check(key in data, where, f"no {key!r}", f"{key!r} is a text and has to be there", f'add {key} = "..."')
        return self.typed(data, key, where, "", lambda v: isinstance(v, str) and v.strip() != "", "a text")

    def typed(
        self,
        data: Mapping[str, Any],
        key: str,
        where: tuple[str | int, ...],
        default: _T,
        good: Callable[[Any], bool],
        form: str,
    ) -> _T:
        """Return a value of the expected form, or the default where it is left out."""
        value: _T = data.get(key, default)
        if key in data and not good(value):  # as above: writing out a table costs more than reading it
            raise self.fail((*where, key), f"{key} = {value!r}", f"{key!r} is {form}", "correct it")
        return value
