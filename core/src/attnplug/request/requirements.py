"""What a layer of a model, and the engine around it, request of an attention backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from attrs import field, frozen
from attrs.converters import optional

from attnplug.errors import RequirementsError, near, shown
from attnplug.request.contradictions import refuse_contradictions
from attnplug.request.domains import (
    ATTENTION_TYPES,
    CACHE_DTYPE,
    CACHE_FORMS,
    DTYPE,
    ENCODERS,
    FEATURE,
    GRAPH_LEVELS,
    LATENT,
    LAYOUT,
    QUANTIZED,
    Flag,
    Integer,
    Level,
    Name,
    Names,
    Number,
    Table,
)
from attnplug.request.field import Field, Follows, declared, documented, fields_in, with_default
from attnplug.request.torch_values import dtype_text

if TYPE_CHECKING:
    from collections.abc import Callable

_C = TypeVar("_C", bound=type)

model = partial(with_default, "model")
engine = partial(with_default, "engine")

_OUT_OF_SCOPE = {
    "dropout": "attention dropout is a training feature",
    "dropout_p": "attention dropout is a training feature",
    "backward": "the backward pass is a training feature",
    "requires_grad": "the backward pass is a training feature",
    "training": "the backward pass is a training feature",
}

_OF_LATENT = ("mla", "use_mla", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


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
        for item in _FIELDS:
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
    if name in _OF_LATENT:
        raise RequirementsError(
            f"{name!r} was requested",
            "multi-head latent attention (MLA) is requested with the sizes of its cached latents",
            "pass latent=True, head_size=kv_lora_rank + qk_rope_head_dim, head_size_v=kv_lora_rank, num_kv_heads=1",
        )
    if name not in _NAMES:
        raise RequirementsError(
            f"the requirement {shown(name)} was given{near(name, _NAMES)}",
            f"the requirements are {', '.join(_NAMES)}",
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

    head_size: int = field(metadata=declared("model", Integer(), "elements of one query and key head", in_layer=True))
    # Required unless late, and None while they are not bound.
    num_q_heads: int = model(
        Integer(), "query heads on this rank", required=True, open=True, in_layer=True, has_ranges=True
    )
    num_kv_heads: int = model(
        Integer(), "key and value heads on this rank", required=True, open=True, in_layer=True, has_ranges=True
    )
    dtype: str = field(converter=dtype_text, metadata=declared("model", DTYPE, "dtype of query, key, value and output"))
    head_size_v: int | None = model(
        Integer(),
        "elements of one value head; None is head_size",
        follows=Follows(("head_size",), "head_size"),
        neutral_words="head_size_v = head_size",
        in_layer=True,
    )
    sliding_window: int | None = model(
        Integer(),
        "tokens that a token attends to, itself included; left = w - 1, right = 0",
        in_layer=True,
        has_ranges=True,
    )
    attention_chunk: int | None = model(
        Integer(), "chunked-local attention: tokens per chunk", in_layer=True, has_ranges=True
    )
    logits_soft_cap: float | None = model(
        Number(), "scaled scores become cap * tanh(score / cap); in their unit", in_layer=True, has_ranges=True
    )
    alibi: str | None = model(Name(values=("linear", "sqrt")), "ALiBi slopes, and the form of their distance")
    sinks: bool = model(Flag(), "one learned logit per query head joins the softmax denominator", default=False)
    attn_type: str = model(
        Name(values=ATTENTION_TYPES), "which attention of the model this is", default="decoder", in_layer=True
    )
    causal: bool | None = model(
        Flag(),
        "a token attends to no later token; neutral is true for decoders, false otherwise",
        neutral=True,
        follows=Follows(("attn_type",), "true for decoders, false otherwise", lambda kind: kind == "decoder"),
        neutral_words="the attention type's own mask",
    )
    block_sparse: Mapping[str, Any] | None = model(Table(), "a block-sparse pattern: its parameters", in_layer=True)
    custom_mask: bool = model(Flag(), "each call has an arbitrary mask", default=False)
    attn_bias: bool = model(Flag(), "each call has an additive mask, for contiguous K/V only", default=False)
    mm_prefix: bool = model(
        Flag(),
        "tokens of one span, an image's for example, attend to each other in both directions, within a causal mask",
        default=False,
    )
    latent: bool = model(
        Flag(),
        "absorbed multi-head latent attention (MLA): a key is a latent of head_size_v elements, its value too, "
        "and head_size - head_size_v rotary ones",
        default=False,
    )
    topk: int | None = model(
        Integer(),
        "sparse attention over latents: each token attends to at most so many cached tokens, whose slots come with "
        "the call",
        in_layer=True,
        has_ranges=True,
    )
    kv_sharing: bool = model(Flag(), "the layer reads the KV cache of an earlier layer", default=False)

    paged: bool | None = engine(
        Flag(),
        "keys and values are in a paged KV cache; otherwise each call has contiguous K/V",
        neutral=False,
        follows=Follows(
            ("attn_type", "attn_bias"),
            "true, but false for encoders and with attn_bias",
            lambda kind, is_biased: kind not in ENCODERS and not is_biased,
            requests=True,
        ),
    )
    phases: tuple[str, ...] = engine(
        Names(each=Name(values=("prefill", "decode")), empty=False),
        "the phases that the backend has to serve",
        default=("prefill", "decode"),
    )
    block_size: int | None = engine(Integer(), "tokens per KV-cache block", free=True, of_pages=True)
    kv_layout: str | None = engine(LAYOUT, "order of tokens and heads inside a block", free=True, of_pages=True)
    kv_cache_form: str | None = engine(
        Name(values=(*CACHE_FORMS, LATENT)),
        "where values are, seen from their keys",
        free=True,
        of_pages=True,
        follows=Follows(
            ("latent", "paged"),
            "'latent' where the keys are latents; otherwise None, which leaves it to the negotiation",
            lambda latent, paged: LATENT if latent and paged else None,
        ),
    )
    kv_cache_dtype: str = engine(
        CACHE_DTYPE,
        "dtype of the KV cache; auto is the dtype",
        default="auto",
        converter=dtype_text,
        follows=Follows(("dtype",), "the dtype"),
        neutral_words="the dtype",
        of_pages=True,
    )
    cudagraph: str = engine(Level(values=GRAPH_LEVELS), "least CUDA graph level that the engine needs", default="never")
    cascade: bool = engine(
        Flag(), "attention over a prefix shared by all requests is computed once", default=False, of_pages=True
    )
    return_lse: bool = engine(Flag(), "the log-sum-exp is returned too", default=False)
    decode_query_len: int = engine(Integer(), "longest query of a decode, in tokens", default=1, has_ranges=True)
    dcp_size: int = engine(Integer(), "ranks of decode context parallelism", default=1, of_pages=True)
    batch_invariant: bool = engine(Flag(), "results do not depend on what else is in the batch", default=False)
    seq_lens_cpu_kind: str = engine(
        Name(values=("exact", "upper_bound", "absent")),
        "CPU sequence lengths: exact, an upper bound, or absent",
        default="exact",
    )
    query_lens_cpu_kind: str = engine(
        Name(values=("exact", "absent")),
        "CPU query lengths: exact, or absent: then each build reads all lengths from the device",
        default="exact",
        open=True,
    )
    kv_in_cache: bool = engine(
        Flag(), "a call may come without K/V: those of its rows are in the KV cache already", default=False
    )
    per_head_scales: bool = engine(Flag(), "quantization scales are per head", default=False)
    unquantized_queries: bool = engine(
        Flag(),
        "queries keep the dtype beside a quantized KV cache: no backend that quantizes them is chosen",
        default=False,
        open=True,
    )
    output_quant: str | None = engine(
        QUANTIZED, "the output is quantized to this dtype", converter=optional(dtype_text)
    )
    features: tuple[str, ...] = engine(Names(each=FEATURE), "open features, by dotted name", default=())
    late: tuple[str, ...] = with_default(
        "selection",
        Names(each=Name(values=("block_size", "num_q_heads", "num_kv_heads"))),
        "fields that are bound after the selection, with `Selection.bind`",
        default=(),
        free=True,
    )

    _key: tuple[Any, ...] = field(init=False, repr=False)
    _hash: int = field(init=False, repr=False)
    _requested: tuple[tuple[str, Any], ...] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        put = object.__setattr__  # of a frozen class; values are canonical before anything compares or hashes them
        late = self.late
        if type(late) is not tuple or late:
            put(self, "late", late := _canonical(_LATE, late, ()))
        for item in _FIELDS:
            put(self, item.name, _canonical(item, getattr(self, item.name), late))
        get = partial(getattr, self)
        for item, follows in _FOLLOWING:
            if getattr(self, item.name) in (None, "auto"):
                put(self, item.name, follows.value(get))
        refuse_contradictions(self)
        put(self, "_key", tuple(getattr(self, item.name) for item in _FIELDS))
        put(self, "_hash", hash(self._key))
        pairs = zip(_FIELDS, self._key, strict=True)
        put(self, "_requested", tuple((item.name, value) for item, value in pairs if _is_requested(item, value, get)))

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
        heads = self.num_q_heads, self.num_kv_heads
        return cast("int", None if None in heads else heads[0] // heads[1])

    def requested(self) -> tuple[tuple[str, Any], ...]:
        """
        Return the fields that request something, with their values: required ones, and those that are not neutral.
        """
        return self._requested

    def facts(self) -> dict[str, Any]:
        """Return every field that a rule can be about, and derived ones, with their values: all but `late`."""
        return {
            **{item.name: value for item, value in zip(_FIELDS, self._key, strict=True) if item is not _LATE},
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
            for item, value in zip(_FIELDS, self._key, strict=True)
            if value != (item.neutral if item.follows is None else item.follows.value(partial(getattr, self)))
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


def _canonical(item: Field, value: Any, late: tuple[str, ...]) -> Any:
    if value is None and (item.is_optional() or item.follows is not None or item.name in late):
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
        for name in (word, word.lower(), word.upper(), item.domain.aliases.get(f"torch.{word}")):
            if name in item.domain.values:
                return f"write {item.name}={name!r}"
    return f"pass another {item.name}"


def _is_requested(item: Field, value: Any, get: Callable[[str], Any]) -> bool:
    if item.free or value is None:  # a required field is None where it is late
        return False
    return item.required or bool(value != item.neutral_for(get))


_FIELDS = fields_in(Requirements)
_LATE = next(item for item in _FIELDS if item.kind == "selection")
_NAMES = dict.fromkeys(item.name for item in _FIELDS)
_FOLLOWING = tuple((item, item.follows) for item in _FIELDS if item.follows is not None)

if Requirements.__doc__:  # without -OO
    Requirements.__doc__ = documented(Requirements.__doc__, _FIELDS)
