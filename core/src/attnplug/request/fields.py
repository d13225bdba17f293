"""
The fields of a request, and the kinds of value that they can have.

A domain turns what a user or a manifest wrote into the one canonical value that is compared, and defines how values are
ordered and described.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, Final, Literal

from attrs import field, frozen

from attnplug.request.device import HARDWARE, MOST, ComputeCapability, parse_capability
from attnplug.request.tables import FrozenTable, is_entry

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


_LONGEST_NAME: Final = 200

Kind = Literal["model", "engine", "selection", "device", "derived"]


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
    """

    name: str
    kind: Kind
    domain: Domain
    help: str
    neutral: Any = None
    required: bool = False
    open: bool = False
    free: bool = False

    def is_optional(self) -> bool:
        """Whether None is a value: "not requested", or "settle it"."""
        return self.neutral is None and not self.required


FLOAT_ALIASES: Final = MappingProxyType(
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
_DTYPE: Final = Name(values=("float64", "float32", "bfloat16", "float16"), aliases=FLOAT_ALIASES)
_CACHE_DTYPE: Final = Name(
    values=("auto", *_DTYPE.values, "fp8_e4m3", "fp8_e5m2", "int8", "int8_k", "int4", "nvfp4"),
    aliases=FLOAT_ALIASES,
    open=True,
)
_QUANTIZED: Final = Name(values=("fp8_e4m3", "fp8_e5m2", "int8", "int4", "nvfp4"), aliases=FLOAT_ALIASES, open=True)
_FEATURE: Final = Name(open=True, text="a dotted name such as 'acme.rope_fused'")

CACHE_FORMS: Final = ("joint", "interleaved", "split", "packed", "independent")
"""Where a block's values are, seen from its keys: `attnplug.contract.split_kv` says what each form is in memory."""

GRAPH_LEVELS: Final = ("never", "single_token_decode", "uniform_batch", "always")
ATTENTION_TYPES: Final = ("decoder", "encoder", "encoder_only", "encoder_decoder")

_ALL: Final = (
    Field("head_size", "model", Integer(), "elements of one query and key head", required=True),
    Field("num_q_heads", "model", Integer(), "query heads on this rank", required=True, open=True),
    Field("num_kv_heads", "model", Integer(), "key and value heads on this rank", required=True, open=True),
    Field("dtype", "model", _DTYPE, "dtype of query, key, value and output", required=True),
    Field("head_size_v", "model", Integer(), "elements of one value head; None is head_size"),
    Field(
        "sliding_window", "model", Integer(), "tokens that a token attends to, itself included; left = w - 1, right = 0"
    ),
    Field("attention_chunk", "model", Integer(), "chunked-local attention: tokens per chunk"),
    Field(
        "logits_soft_cap",
        "model",
        Number(),
        "scaled scores become cap * tanh(score / cap); in their unit",
    ),
    Field("alibi", "model", Name(values=("linear", "sqrt")), "ALiBi slopes, and the form of their distance"),
    Field("sinks", "model", Flag(), "one learned logit per query head joins the softmax denominator", neutral=False),
    Field(
        "attn_type", "model", Name(values=ATTENTION_TYPES), "which attention of the model this is", neutral="decoder"
    ),
    Field(
        "causal",
        "model",
        Flag(),
        "a token attends to no later token; neutral is true for decoders, false otherwise",
        neutral=True,
    ),
    Field("block_sparse", "model", Table(), "a block-sparse pattern: its parameters"),
    Field("custom_mask", "model", Flag(), "each call has an arbitrary mask", neutral=False),
    Field("attn_bias", "model", Flag(), "each call has an additive mask, for contiguous K/V only", neutral=False),
    Field("kv_sharing", "model", Flag(), "the layer reads the KV cache of an earlier layer", neutral=False),
    Field(
        "paged",
        "engine",
        Flag(),
        "keys and values are in a paged KV cache; otherwise each call has contiguous K/V",
        neutral=False,
    ),
    Field(
        "phases",
        "engine",
        Names(each=Name(values=("prefill", "decode")), empty=False),
        "the phases that the backend has to serve",
        neutral=("prefill", "decode"),
    ),
    Field("block_size", "engine", Integer(), "tokens per KV-cache block", free=True),
    Field("kv_layout", "engine", Name(values=("NHD", "HND")), "order of tokens and heads inside a block", free=True),
    Field("kv_cache_form", "engine", Name(values=CACHE_FORMS), "where values are, seen from their keys", free=True),
    Field("kv_cache_dtype", "engine", _CACHE_DTYPE, "dtype of the KV cache; auto is the dtype", neutral="auto"),
    Field(
        "cudagraph",
        "engine",
        Level(values=GRAPH_LEVELS),
        "least CUDA graph level that the engine needs",
        neutral="never",
    ),
    Field(
        "cascade", "engine", Flag(), "attention over a prefix shared by all requests is computed once", neutral=False
    ),
    Field("return_lse", "engine", Flag(), "the log-sum-exp is returned too", neutral=False),
    Field("decode_query_len", "engine", Integer(), "longest query of a decode, in tokens", neutral=1),
    Field("dcp_size", "engine", Integer(), "ranks of decode context parallelism", neutral=1),
    Field("batch_invariant", "engine", Flag(), "results do not depend on what else is in the batch", neutral=False),
    Field(
        "seq_lens_cpu_kind",
        "engine",
        Name(values=("exact", "upper_bound", "absent")),
        "CPU sequence lengths: exact, an upper bound, or absent",
        neutral="exact",
    ),
    Field(
        "query_lens_cpu_kind",
        "engine",
        Name(values=("exact", "absent")),
        "CPU query lengths: exact, or absent: then each build reads all lengths from the device",
        neutral="exact",
        open=True,
    ),
    Field(
        "kv_in_cache",
        "engine",
        Flag(),
        "a call may come without K/V: those of its rows are in the KV cache already",
        neutral=False,
    ),
    Field("per_head_scales", "engine", Flag(), "quantization scales are per head", neutral=False),
    Field("output_quant", "engine", _QUANTIZED, "the output is quantized to this dtype"),
    Field("features", "engine", Names(each=_FEATURE), "open features, by dotted name", neutral=()),
    Field("device_type", "device", Word(), "device type, as torch names it", required=True),
    Field("vendor", "device", Word(), "the device's manufacturer; undeclared, a variant for cuda admits NVIDIA only"),
    Field("compute_capability", "device", Capability(), "CUDA compute capability"),
    Field("device_name", "device", Text(), "the device's product name", open=True),
    Field("num_multiprocessors", "device", Integer(), "streaming multiprocessors", open=True),
    Field("arch", "device", Word(), "the LLVM target of an AMD device, such as gfx942", open=True),
    Field("gqa_ratio", "derived", Integer(), "query heads per KV head: num_q_heads // num_kv_heads", open=True),
)

FIELDS: Final[Mapping[str, Field]] = MappingProxyType({item.name: item for item in _ALL})
"""Every field by name, in the order in which they are reported."""


LATE: Final = Field(
    "late",
    "selection",
    Names(each=Name(values=("block_size", "num_q_heads", "num_kv_heads"))),
    "fields that are bound after the selection, with `Selection.bind`",
    neutral=(),
    free=True,
)
"""Which fields the host binds later. It is not in `FIELDS`: a manifest declares nothing about it."""


def fields_of(*kinds: Kind) -> tuple[Field, ...]:
    """Return the fields of these kinds, in table order."""
    return tuple(item for item in (*_ALL, LATE) if item.kind in kinds)


def near(name: str, names: Mapping[str, object] | tuple[str, ...] | list[str] | set[str] | frozenset[str]) -> str:
    """Return "; did you mean 'x'?" where a name is close to one of `names`, else an empty text."""
    if len(name) > _LONGEST_NAME:
        return ""  # comparing takes time that grows with the square of the length
    matches = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
