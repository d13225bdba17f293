"""What a layer of a model, and the engine around it, request of an attention backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs
from attrs import field, frozen
from attrs.converters import optional

from attnplug.errors import RequirementsError, shown
from attnplug.request.field_docs import document
from attnplug.request.fields import FIELDS, LATE, Field, Name, fields_of, near
from attnplug.request.torch_values import dtype_text

if TYPE_CHECKING:
    from collections.abc import Callable

_C = TypeVar("_C", bound=type)

_OUT_OF_SCOPE = {
    "dropout": "attention dropout is a training feature",
    "dropout_p": "attention dropout is a training feature",
    "backward": "the backward pass is a training feature",
    "requires_grad": "the backward pass is a training feature",
    "training": "the backward pass is a training feature",
    "mla": "multi-head latent attention has another cache and another contract",
    "use_mla": "multi-head latent attention has another cache and another contract",
    "kv_lora_rank": "multi-head latent attention has another cache and another contract",
    "q_lora_rank": "multi-head latent attention has another cache and another contract",
}


def _named_fields_only(cls: _C) -> _C:
    """Make the constructor raise an error of this project for unknown and missing names, instead of a TypeError."""
    construct: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @wraps(construct)
    def init(self: object, /, *args: object, **given: object) -> None:
        if args:
            raise RequirementsError(
                f"{len(args)} unnamed values were given",
                "every requirement is given by name",
                "write head_size=128, ...",
            )
        for name in given:
            _check_known(name)
        late = given.get("late", ())
        bound_later = late if isinstance(late, (tuple, list, set, frozenset)) else ()
        for item in _REQUESTED:
            if item.required and item.name not in given and item.name not in bound_later:
                raise RequirementsError(
                    f"no {item.name!r} was given",
                    f"{item.name} is {item.help}: {item.domain.text}",
                    f"pass {item.name}=..., on the command line --{item.name.replace('_', '-')}",
                )
        construct(self, **given)

    cls.__init__ = init  # type: ignore[misc]
    return cls


def _check_known(name: str) -> None:
    if name in _OUT_OF_SCOPE:
        raise RequirementsError(
            f"{name!r} was requested",
            "contract 1.0 is for inference with multi-head, grouped-query and multi-query attention: "
            f"{_OUT_OF_SCOPE[name]}",
            f"leave {name!r} out, and keep the model's own attention where it is needed",
        )
    if name not in _NAMES:
        known = [item.name for item in _REQUESTED]
        raise RequirementsError(
            f"the requirement {shown(name)} was given{near(name, known)}",
            f"the requirements are {', '.join(known)}",
            "use one of these names; an open feature goes into features=('vendor.name',)",
        )


@_named_fields_only
@frozen(eq=False, kw_only=True)
class Requirements:
    """
    The requirements of one attention layer. Frozen, hashable, free of tensors; values are canonical after construction
    (``"fp8"`` becomes ``"fp8_e4m3"``).

    The fields up to `kv_sharing` belong to the *model*: no fix ever changes them. Those after it belong to the
    *engine*. `block_size`, `kv_layout` and `kv_cache_form` may be left None: the negotiation settles them. Where a
    dtype is a value, a `torch.dtype` is one too.

    `late` names what the engine does not know yet: ``"block_size"``, ``"num_q_heads"``, ``"num_kv_heads"``. Such a
    field is not given, and is None: the request is for any value that the variant serves, and `Selection.bind` settles
    it.

    Raises:
        RequirementsError: A name is unknown, a value is outside its domain, or two values contradict each other.
    """

    head_size: int
    num_q_heads: int = field(default=None)  # required, unless late; None while it is not bound
    num_kv_heads: int = field(default=None)  # likewise
    dtype: str = field(converter=dtype_text)
    head_size_v: int | None = None
    sliding_window: int | None = None
    attention_chunk: int | None = None
    logits_soft_cap: float | None = None
    alibi: str | None = None
    sinks: bool = False
    attn_type: str = "decoder"
    causal: bool | None = None
    block_sparse: Mapping[str, Any] | None = None
    custom_mask: bool = False
    attn_bias: bool = False
    kv_sharing: bool = False

    paged: bool | None = None
    phases: tuple[str, ...] = ("prefill", "decode")
    block_size: int | None = None
    kv_layout: str | None = None
    kv_cache_form: str | None = None
    kv_cache_dtype: str = field(default="auto", converter=dtype_text)
    cudagraph: str = "never"
    cascade: bool = False
    return_lse: bool = False
    decode_query_len: int = 1
    dcp_size: int = 1
    batch_invariant: bool = False
    seq_lens_cpu_kind: str = "exact"
    query_lens_cpu_kind: str = "exact"
    kv_in_cache: bool = False
    per_head_scales: bool = False
    output_quant: str | None = field(default=None, converter=optional(dtype_text))
    features: tuple[str, ...] = ()
    late: tuple[str, ...] = ()

    _key: tuple[Any, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)
    _requested: tuple[tuple[str, Any], ...] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        put = object.__setattr__  # of a frozen class; values are canonical before anything compares or hashes them
        late = self.late
        if late != ():
            put(self, "late", late := _canonical(LATE, late, ()))
        for item in _REQUESTED:
            put(self, item.name, _canonical(item, getattr(self, item.name), late))
        for name, settle in _DEPENDENT.items():
            if getattr(self, name) in (None, "auto"):
                put(self, name, settle(self))
        _refuse_contradictions(self)
        put(self, "_key", tuple(getattr(self, item.name) for item in _REQUESTED))
        put(self, "_hash", hash(self._key))
        put(
            self,
            "_requested",
            tuple(
                (item.name, value)
                for item, value in zip(_REQUESTED, self._key, strict=True)
                if _is_requested(self, item, value)
            ),
        )

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Requirements) else NotImplemented

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.to_dict().items())
        return f"Requirements({given})"

    @property
    def gqa_ratio(self) -> int:
        """Query heads per key and value head; None where a head count is late."""
        return cast("int", None if _has_late_heads(self) else self.num_q_heads // self.num_kv_heads)

    def requested(self) -> tuple[tuple[str, Any], ...]:
        """
        Return the fields that request something, with their values: required ones, and those that are not neutral.
        """
        return self._requested

    def facts(self) -> dict[str, Any]:
        """Return every field that a rule can be about, and derived ones, with their values: all but `late`."""
        return {
            **dict(zip(_FACTS, self._key, strict=False)),
            "gqa_ratio": self.gqa_ratio,
        }

    def evolve(self, **changes: object) -> Requirements:
        """
        Return a copy with other values. Fields that follow from a changed one (`head_size_v`, `kv_cache_dtype`, ...)
        follow again.
        """
        for name in changes:
            _check_known(name)
        return Requirements(**{**self.to_dict(), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: required fields, and those that differ from their default."""
        return {
            item.name: item.domain.dump(value)
            for item, value in zip(_REQUESTED, self._key, strict=True)
            if value != _default(self, item)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Requirements:
        """
        Read what `to_dict` wrote.

        Raises:
            RequirementsError: As for the constructor, and for anything but a mapping of names.
        """
        if not isinstance(data, Mapping) or not all(isinstance(name, str) for name in data):
            raise RequirementsError(
                f"{shown(data)} was received as requirements",
                "they are what Requirements.to_dict returned: a mapping of names to values",
                "send that, as JSON",
            )
        return cls(**data)


def neutral(name: str, facts: Mapping[str, Any]) -> Any:
    """Return the value of a field that requests nothing; some follow from other fields."""
    if name == "head_size_v":
        return facts["head_size"]
    if name == "kv_cache_dtype":
        return facts["dtype"]
    if name == "causal":
        return facts["attn_type"] == "decoder"
    return FIELDS[name].neutral


_OF_TORCH = {"float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


def _canonical(item: Field, value: Any, late: tuple[str, ...]) -> Any:
    if value is None and (item.is_optional() or item.name in _DEPENDENT or item.name in late):
        return None
    try:
        return item.domain.canonical(value)
    except ValueError as error:
        raise RequirementsError(
            f"{item.name}={shown(value)} was given",
            f"{item.name} ({item.help}) is {error}" + (", or None" if item.is_optional() else ""),
            _fix(item, value) + ("" if item.required else ", or leave it out"),
        ) from None


def _fix(item: Field, value: Any) -> str:
    """Return what to write for a name in upper or lower case, or for an object of torch."""
    word = (value if isinstance(value, str) else shown(value)).rpartition(".")[2]
    if isinstance(item.domain, Name):
        for name in (word, word.lower(), word.upper(), _OF_TORCH.get(word)):
            if name in item.domain.values:
                return f"write {item.name}={name!r}"
    return f"pass another {item.name}"


def _default(requirements: Requirements, item: Field) -> Any:
    """Return the value of a field that is left out; None for a required field."""
    settle = _DEPENDENT.get(item.name)
    return settle(requirements) if settle else _DEFAULTS.get(item.name)


def _is_requested(requirements: Requirements, item: Field, value: Any) -> bool:
    if item.free or value is None:  # a required field is None where it is late
        return False
    facts = {"head_size": requirements.head_size, "dtype": requirements.dtype, "attn_type": requirements.attn_type}
    return item.required or bool(value != neutral(item.name, facts))


def _refuse_contradictions(r: Requirements) -> None:
    for holds, given, allowed, fix in _CONTRADICTIONS:
        if holds(r):
            raise RequirementsError(given(r), allowed, fix)


def _is_encoder(r: Requirements) -> bool:
    return r.attn_type in ("encoder", "encoder_only")


def _has_late_heads(r: Requirements) -> bool:
    return "num_q_heads" in r.late or "num_kv_heads" in r.late


_REQUESTED = fields_of("model", "engine", "selection")
_NAMES = frozenset(item.name for item in _REQUESTED)
_FACTS = tuple(item.name for item in _REQUESTED if item is not LATE)  # which is the last one

_DEPENDENT: dict[str, Callable[[Requirements], Any]] = {
    "head_size_v": lambda r: r.head_size,
    "causal": lambda r: r.attn_type == "decoder",
    "paged": lambda r: not _is_encoder(r) and not r.attn_bias,
    "kv_cache_dtype": lambda r: r.dtype,
}

_CONTRADICTIONS: tuple[tuple[Callable[[Requirements], bool], Callable[[Requirements], str], str, str], ...] = (
    (
        lambda r: bool(r.late) and any(getattr(r, name) is not None for name in r.late),
        lambda r: f"late={r.late} and {', '.join(f'{n}={getattr(r, n)}' for n in r.late)} were given",
        "what is late has no value yet: Selection.bind gives it one",
        "leave the value out, or take its name out of late",
    ),
    (
        lambda r: not r.paged and "block_size" in r.late,
        lambda r: f"paged=False and late={r.late} were given",
        "only a paged KV cache has a block size to bind later",
        "take 'block_size' out of late, or request paged=True",
    ),
    (
        lambda r: not (r.late and _has_late_heads(r)) and r.num_q_heads % r.num_kv_heads != 0,
        lambda r: f"num_q_heads={r.num_q_heads} and num_kv_heads={r.num_kv_heads} were given",
        "num_q_heads is a multiple of num_kv_heads: each KV head serves a whole group of query heads",
        "pass the head counts of one tensor-parallel rank",
    ),
    (
        lambda r: bool(r.causal) and r.attn_type != "decoder",
        lambda r: f"causal=True and attn_type={r.attn_type!r} were given",
        "encoder and cross attention attend to every key",
        "leave causal out, or request attn_type='decoder'",
    ),
    (
        lambda r: bool(r.paged) and _is_encoder(r),
        lambda r: f"paged=True and attn_type={r.attn_type!r} were given",
        "encoder attention has no KV cache",
        "leave paged out, or request attn_type='decoder'",
    ),
    (
        lambda r: not r.paged and (r.block_size, r.kv_layout, r.kv_cache_form) != (None, None, None),
        lambda r: (
            f"paged=False, block_size={r.block_size}, kv_layout={r.kv_layout!r} and kv_cache_form={r.kv_cache_form!r} "
            "were given"
        ),
        "block size, layout and form describe a paged KV cache",
        "leave block_size, kv_layout and kv_cache_form out, or request paged=True",
    ),
    (
        lambda r: not r.paged and r.kv_cache_dtype != r.dtype,
        lambda r: f"paged=False and kv_cache_dtype={r.kv_cache_dtype!r} were given",
        "only a paged KV cache has another dtype than the layer",
        "leave kv_cache_dtype out, or request paged=True",
    ),
    (
        lambda r: not r.paged and (r.cascade or r.dcp_size > 1 or r.kv_sharing),
        lambda r: f"paged=False, cascade={r.cascade}, dcp_size={r.dcp_size} and kv_sharing={r.kv_sharing} were given",
        "cascade, decode context parallelism and KV sharing need a paged KV cache",
        "request paged=True",
    ),
    (
        lambda r: bool(r.paged) and r.attn_bias,
        lambda r: f"paged={r.paged} and attn_bias={r.attn_bias} were given",
        "an additive mask comes with calls that have contiguous (non-paged) K/V",
        "request paged=False",
    ),
    (
        lambda r: not r.paged and r.kv_in_cache,
        lambda r: f"paged=False and kv_in_cache={r.kv_in_cache} were given",
        "only a paged KV cache can have the K/V of a call already",
        "request paged=True, or leave kv_in_cache out",
    ),
    (
        lambda r: r.decode_query_len > 1 and "decode" not in r.phases,
        lambda r: f"decode_query_len={r.decode_query_len} and phases={r.phases} were given",
        "only the decode phase has a decode query length",
        "leave decode_query_len out, or add 'decode' to phases",
    ),
)

if Requirements.__doc__:  # without -OO
    Requirements.__doc__ = document(Requirements.__doc__, _REQUESTED)

_DEFAULTS = {a.name: a.default for a in attrs.fields(Requirements) if a.default is not attrs.NOTHING}
