"""
The kinds of value that a field can have.

A domain turns what a user or a manifest wrote into the one canonical value that is compared, and defines how values are
ordered and described.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

from attrs import field, frozen

from attnplug.request.capability import HARDWARE, ComputeCapability, parse_capability
from attnplug.request.tables import FrozenTable, is_entry, read_only

MOST: Final = 2**31 - 1
"""The largest number of a request: kernels and index tensors are int32."""

_OPEN_NAME = re.compile(
    r"(?!torch\.)[a-z0-9_]+(\.[a-z0-9_]+)+"
)  # a dtype of torch without an alias is no vendor's name


@frozen(kw_only=True)
class Domain(ABC):
    """
    A set of values.

    Attributes:
        text: What a value is, as error messages say it.
    """

    text: str

    @abstractmethod
    def canonical(self, value: Any) -> Any:
        """
        Return the one value that `value` means.

        Raises:
            ValueError: `value` is not of this domain.
        """

    def rank(self, value: Any) -> Any:
        """Return what ranges compare, or None where values have no order."""
        del value
        return None

    def allows(self, allowed: Any, value: Any) -> bool:
        """Whether a value that a manifest lists admits the requested `value`."""
        return bool(allowed == value)

    def span(self, allowed: Any) -> tuple[Any, Any] | None:
        """Return the lowest and the highest value that a listed value admits, where it admits more than itself."""
        del allowed
        return None

    def example(self) -> Any:
        """
        Return a value for a range without bounds, or None where no value is better known than others: of open names and
        of texts.
        """
        return None

    def dump(self, value: Any) -> Any:
        """Return `value` as JSON can carry it; `canonical` reads it back."""
        return value

    def refuse(self) -> ValueError:
        """Return the error that says what this domain holds."""
        return ValueError(self.text)


@frozen(kw_only=True)
class Flag(Domain):
    """True or false."""

    text: str = "true or false"

    def canonical(self, value: Any) -> bool:
        """Return the value itself, if it is one of this domain."""
        if type(value) is not bool:
            raise self.refuse()
        return value


@frozen(kw_only=True)
class Integer(Domain):
    """Whole numbers from `min` to `max`: kernels take all of them, windows and chunks too, as int32."""

    min: int = 1
    max: int = MOST
    text: str = field()

    @text.default
    def _describe(self) -> str:
        return f"a whole number from {self.min} to {self.max}"

    def canonical(self, value: Any) -> int:
        """Return the value itself, if it is one of this domain."""
        if type(value) is not int or not self.min <= value <= self.max:
            raise self.refuse()
        return value

    def rank(self, value: Any) -> int:
        """Return the place in the order."""
        return int(value)

    def example(self) -> int:
        """Return the smallest one."""
        return self.min


@frozen(kw_only=True)
class Number(Domain):
    """
    Positive numbers that are normal in float32, as kernels compute, and whose inverse is: they divide by it as well.
    """

    text: str = "a positive finite number, from 2**-126 to 2**126 (about 1.2e-38 to 8.5e37)"

    def canonical(self, value: Any) -> float:
        """Return the value itself, if it is one of this domain."""
        if type(value) not in (int, float) or not 2.0**-126 <= value <= 2.0**126:
            raise self.refuse()
        return float(value)

    def rank(self, value: Any) -> float:
        """Return the place in the order."""
        return float(value)

    def example(self) -> float:
        """Return 1: there is no smallest positive number."""
        return 1.0


@frozen(kw_only=True)
class Name(Domain):
    """
    One name of a list.

    Attributes:
        values: The names, canonical.
        aliases: Other spellings.
        open: Whether a dotted name (``vendor.name``) is a value too.
    """

    values: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(factory=dict, hash=False)
    open: bool = False
    text: str = field()

    @text.default
    def _describe(self) -> str:
        listed = f"one of {', '.join(map(repr, self.values))}"
        return f"{listed}, or a dotted vendor name" if self.open else listed

    def canonical(self, value: Any) -> str:
        """Return the canonical form."""
        if isinstance(value, str):
            plain = str.__str__(value)  # of an enumeration's member its text
            name = self.aliases.get(plain, plain)
            if name in self.values or (self.open and _OPEN_NAME.fullmatch(name)):
                return name
        raise self.refuse()


@frozen(kw_only=True)
class Level(Name):
    """Names in a rising order."""

    def rank(self, value: Any) -> int:
        """Return the place in the order."""
        return self.values.index(value)

    def example(self) -> str:
        """Return the highest one, as of every range that has no lower bound."""
        return self.values[-1]


@frozen(kw_only=True)
class Word(Domain):
    """Any lower-case word: a device type, a vendor."""

    text: str = "a lower-case word"

    def canonical(self, value: Any) -> str:
        """Return the text itself, if it is one of this domain."""
        if not isinstance(value, str) or re.fullmatch(r"[a-z][a-z0-9_]*", value) is None:
            raise self.refuse()
        return str.__str__(value)


@frozen(kw_only=True)
class Text(Domain):
    """Any text that is not empty."""

    text: str = "a text"

    def canonical(self, value: Any) -> str:
        """Return the text itself, if it is one of this domain."""
        if not isinstance(value, str) or not value:
            raise self.refuse()
        return str.__str__(value)


@frozen(kw_only=True)
class Names(Domain):
    """A set of names, kept in a canonical order. To request it is to request each of them."""

    each: Name
    empty: bool = True
    text: str = field()

    @text.default
    def _describe(self) -> str:
        return f"a list, each {self.each.text}"

    def canonical(self, value: Any) -> tuple[str, ...]:
        """Return the canonical form."""
        if isinstance(value, str) or not isinstance(value, (tuple, list, set, frozenset)) or not (value or self.empty):
            raise self.refuse()
        names = {self.each.canonical(item) for item in value}
        return tuple(sorted(names, key=lambda name: (self._place(name), name)))

    def _place(self, name: str) -> int:
        return self.each.values.index(name) if name in self.each.values else len(self.each.values)

    def dump(self, value: Any) -> list[str]:
        """Return a plain JSON value."""
        return list(value)


@frozen(kw_only=True)
class Table(Domain):
    """A table of plain values, kept as sorted pairs so that it hashes."""

    text: str = "a table of names to finite numbers of at most 64 bits, booleans or texts"

    def canonical(self, value: Any) -> FrozenTable:
        """Return the canonical form."""
        pairs = tuple(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, (tuple, list)) or not all(map(is_entry, pairs)):
            raise self.refuse()
        table = {name: item + 0.0 if type(item) is float else item for name, item in pairs}  # -0.0 is 0.0
        if not table or len(table) < len(pairs):
            raise self.refuse()
        return FrozenTable(sorted(table.items()))

    def dump(self, value: Any) -> dict[str, Any]:
        """Return a plain JSON value."""
        return dict(value)


@frozen(kw_only=True)
class Capability(Domain):
    """CUDA compute capabilities."""

    text: str = 'a compute capability such as "9.0", "9.0a" or "10.0f"'

    def canonical(self, value: Any) -> ComputeCapability:
        """Return the canonical form."""
        return parse_capability(value)

    def rank(self, value: ComputeCapability) -> tuple[int, int]:
        """Return the place in the order."""
        return value.number

    def allows(self, allowed: ComputeCapability, value: ComputeCapability) -> bool:
        """Whether the code that a manifest lists runs on the requested hardware."""
        return allowed.runs(value)

    def span(self, allowed: ComputeCapability) -> tuple[ComputeCapability, ComputeCapability] | None:
        """Return the ends of a family; minor numbers have one digit."""
        if allowed.suffix != "f":
            return None
        return ComputeCapability(allowed.major, allowed.minor), ComputeCapability(allowed.major, 9)

    def example(self) -> ComputeCapability:
        """Return the newest known, as of every range that has no lower bound."""
        return HARDWARE[-1]

    def dump(self, value: ComputeCapability) -> str:
        """Return a plain JSON value."""
        return str(value)


_FLOAT_ALIASES: Final = read_only(
    {
        "half": "float16",
        "fp16": "float16",
        "torch.float16": "float16",
        "bf16": "bfloat16",
        "torch.bfloat16": "bfloat16",
        "float": "float32",
        "fp32": "float32",
        "torch.float32": "float32",
        "torch.float64": "float64",
        "fp8": "fp8_e4m3",
        "torch.float8_e4m3fn": "fp8_e4m3",
        "torch.float8_e5m2": "fp8_e5m2",
        "torch.int8": "int8",
    }
)
DTYPE: Final = Name(values=("float64", "float32", "bfloat16", "float16"), aliases=_FLOAT_ALIASES)
FP8_DS_MLA: Final = "fp8_ds_mla"
"""
DeepSeek-V3.2's record of a latent, the dtype of a KV cache: 512 float8_e4m3 codes, the float32 scale of each 128 of
them, then 64 bfloat16 rotary elements.
"""

FP8_DS_MLA_BYTES: Final = 656
"""Bytes of a record."""

PER_TOKEN_HEAD: Final = ("int8_per_token_head", "fp8_per_token_head")
"""
The dtypes of KV caches of int8 or float8_e4m3 codes, with a float32 scale of each token and KV head for its key, and
one for its value. Cache writes compute them: the largest magnitude is 127 or 448 steps.
"""

CACHE_DTYPE: Final = Name(
    values=(
        "auto",
        *DTYPE.values,
        "fp8_e4m3",
        "fp8_e5m2",
        FP8_DS_MLA,
        *PER_TOKEN_HEAD,
        "int8",
        "int8_k",
        "int4",
        "nvfp4",
    ),
    aliases=_FLOAT_ALIASES,
    open=True,
)
QUANTIZED: Final = Name(values=("fp8_e4m3", "fp8_e5m2", "int8", "int4", "nvfp4"), aliases=_FLOAT_ALIASES, open=True)
FEATURE: Final = Name(open=True, text="a dotted name such as 'acme.rope_fused'")

LAYOUT: Final = Name(values=("NHD", "HND"))
CACHE_FORMS: Final = ("joint", "interleaved", "split", "packed", "independent")
"""Where a block's values are, seen from its keys: `attnplug.contract.split_kv` says what each form is in memory."""

LATENT: Final = "latent"
"""The form of a latent KV cache: values are the first elements of their keys. Latent requests have it, and no other."""

GRAPH_LEVELS: Final = ("never", "single_token_decode", "uniform_batch", "always")
ATTENTION_TYPES: Final = ("decoder", "encoder", "encoder_only", "encoder_decoder")
ENCODERS: Final = ("encoder", "encoder_only")
"""The attention types whose keys and values come with each call: they have no KV cache."""
