"""The fields of requests and of devices: each is declared once, as metadata of the attribute that holds it."""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from attnplug.request.domains import Domain

Kind = Literal["model", "engine", "selection", "device", "derived"]

_WIDTH: Final = 100


@frozen
class Follows:
    """
    What decides a field that is left out.

    Attributes:
        names: The fields that it follows.
        words: Its value, in words.
        of: Returns the value, from theirs; a copy of the first one by default.
        requests: Whether that value may request something. Otherwise it is the neutral one.
    """

    names: tuple[str, ...]
    words: str
    of: Callable[..., Any] = lambda first: first
    requests: bool = False

    def value(self, get: Callable[[str], Any]) -> Any:
        """Return the value, where `get` returns that of a field."""
        return self.of(*map(get, self.names))


@frozen
class Field:
    """
    One field.

    Attributes:
        name: Its name.
        kind: What decides it: the *model*, the *engine*, the *device*, or other fields (*derived*, for rules only).
            *selection* says what the selection leaves open; no manifest and no rule is about it.
        domain: The values that it can have.
        help: What it requests, with units.
        neutral: The value that requests nothing: every backend serves it without declaring the field.
        required: Whether it must be given, and declared in a manifest.
        open: Whether an undeclared field accepts any value. Most fields are closed; open are facts that no kernel
            depends on unless its manifest declares it.
        free: Whether None leaves the value to the negotiation.
        follows: The fields that decide it where it is left out.
        neutral_words: The neutral value in words, where it depends on other fields.
        in_layer: Whether `Layer` has it too: None there is the negotiated value, and no other one is accepted.
        of_pages: Whether only a paged KV cache has it.
        has_ranges: Whether evidence at two values is evidence at those between. It is not for sizes of heads and of
            blocks: kernels are written for sizes, and what holds at 64 and at 128 need not hold at 72.
    """

    name: str
    kind: Kind
    domain: Domain
    help: str
    neutral: Any = None
    required: bool = False
    open: bool = False
    free: bool = False
    follows: Follows | None = None
    neutral_words: str = ""
    in_layer: bool = False
    of_pages: bool = False
    has_ranges: bool = False

    def is_optional(self) -> bool:
        """Whether None is a value: "not requested", or "settle it"."""
        return self.neutral is None and not self.required

    def neutral_for(self, get: Callable[[str], Any]) -> Any:
        """Return the neutral value of a request, where `get` returns the values of its fields."""
        return self.neutral if self.follows is None or self.follows.requests else self.follows.value(get)


_DECLARED: Final = "attnplug.field"


def declared(kind: Kind, domain: Domain, words: str, **more: Any) -> dict[str, Any]:
    """
    Return the metadata of an attribute that holds a field.

    Args:
        kind: As of `Field`.
        domain: As of `Field`.
        words: The field's help.
        more: Other attributes of `Field`. Without them the name is the attribute's, the neutral value its default, and
            an attribute without a default is required.
    """
    return {_DECLARED: {"kind": kind, "domain": domain, "help": words, **more}}


def with_default(
    kind: Kind, domain: Domain, words: str, *, default: Any = None, converter: Any = None, **more: Any
) -> Any:
    """Return an attribute that holds a field and has a default. Other arguments as for `declared`."""
    return attrs.field(default=default, converter=converter, metadata=declared(kind, domain, words, **more))


def fields_in(cls: type) -> tuple[Field, ...]:
    """Return the fields that the attributes of an attrs class declare."""
    return tuple(_field(attribute) for attribute in attrs.fields(cls) if _DECLARED in attribute.metadata)


def _field(attribute: attrs.Attribute[Any]) -> Field:
    required = attribute.default is attrs.NOTHING
    own = {"name": attribute.name, "required": required, "neutral": None if required else attribute.default}
    return Field(**{**own, **attribute.metadata[_DECLARED]})


def documented(text: str, fields: Iterable[Field]) -> str:
    """
    Return a class's docstring with its fields: what each requests with its unit, the permitted values, the default.

    Args:
        text: The docstring as written, which ends before the fields.
        fields: The fields, in the order in which `help` lists them.
    """
    lines = (line for item in fields for line in _lines(item))
    return "\n".join([text.rstrip(), "", "    Attributes:", *lines, "    "])


def _lines(item: Field) -> Iterator[str]:
    parts = (item.help, item.domain.text, _default(item))
    text = f"{item.name}: {' '.join(f'{part[0].upper()}{part[1:]}.' for part in parts)}"
    yield from wrap(
        text,
        _WIDTH,
        initial_indent=" " * 8,
        subsequent_indent=" " * 12,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _default(item: Field) -> str:
    if item.follows is not None:
        return f"default: {item.follows.words}"
    if item.required:
        return "required"
    if item.neutral is None:
        return f"default: None, which {'leaves it to the negotiation' if item.free else 'requests nothing'}"
    return f"default: {item.neutral!r}"
