"""
The vocabulary: every field that can be asked for, declared or used in a rule.

Requirements, Device, manifests, rules, errors and the documentation all read this table, so that a word has one
meaning everywhere.
"""

from __future__ import annotations

from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import frozen

from attnplug.request.domain import Capability, Domain, Flag, Integer, Level, Name, Names, Number, Table, Text, Word

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["model", "engine", "device", "derived"]


@frozen
class Field:
    """
    One field.

    Attributes:
        name: Its name.
        kind: Who decides it: the *model*, the *engine*, the *device*, or *derived* from other fields (rules only).
        domain: The values that it can have.
        help: What it asks for, with units.
        neutral: The value that asks for nothing: every backend serves it without declaring the field.
        required: Whether it must be given, and declared in a manifest.
        open: Whether an undeclared field accepts any value. Closed is the rule; open are facts that no
            kernel depends on unless it says so.
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
        """Whether None is a value: "not asked for", or "settle it"."""
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

GRAPH_LEVELS: Final = ("never", "single_token_decode", "uniform_batch", "always")
ATTENTION_TYPES: Final = ("decoder", "encoder", "encoder_only", "encoder_decoder")

_ALL: Final = (
    Field("head_size", "model", Integer(), "size of one query and key head", required=True),
    Field("num_q_heads", "model", Integer(), "query heads on this rank", required=True, open=True),
    Field("num_kv_heads", "model", Integer(), "key and value heads on this rank", required=True, open=True),
    Field("dtype", "model", _DTYPE, "dtype of query, key, value and output", required=True),
    Field("head_size_v", "model", Integer(), "size of one value head; the neutral value is head_size"),
    Field(
        "sliding_window", "model", Integer(), "tokens that a token attends, itself included; left = w - 1, right = 0"
    ),
    Field("attention_chunk", "model", Integer(), "chunked-local attention: tokens per chunk"),
    Field("logits_soft_cap", "model", Number(), "scores become cap * tanh(score / cap)"),
    Field("alibi", "model", Name(values=("linear", "sqrt")), "ALiBi slopes, and the form of their distance"),
    Field("sinks", "model", Flag(), "one learned logit per query head joins the softmax denominator", neutral=False),
    Field(
        "attn_type", "model", Name(values=ATTENTION_TYPES), "which attention of the model this is", neutral="decoder"
    ),
    Field(
        "causal",
        "model",
        Flag(),
        "a token attends no later token; neutral is true for decoders, false otherwise",
        neutral=True,
    ),
    Field("block_sparse", "model", Table(), "a block-sparse pattern: its parameters"),
    Field("custom_mask", "model", Flag(), "an arbitrary mask comes with the call", neutral=False),
    Field("kv_sharing", "model", Flag(), "the layer reads the cache of an earlier layer", neutral=False),
    Field(
        "paged",
        "engine",
        Flag(),
        "keys and values live in a paged cache; otherwise they come whole with each call",
        neutral=False,
    ),
    Field(
        "phases",
        "engine",
        Names(each=Name(values=("prefill", "decode")), empty=False),
        "the phases that this backend has to serve",
        neutral=("prefill", "decode"),
    ),
    Field("block_size", "engine", Integer(), "tokens per cache block", free=True),
    Field("kv_layout", "engine", Name(values=("NHD", "HND")), "order of tokens and heads inside a block", free=True),
    Field("kv_cache_dtype", "engine", _CACHE_DTYPE, "dtype of the cache; auto is the dtype", neutral="auto"),
    Field(
        "cudagraph",
        "engine",
        Level(values=GRAPH_LEVELS),
        "least CUDA graph level that the engine needs",
        neutral="never",
    ),
    Field("cascade", "engine", Flag(), "a prefix shared by all requests is attended once", neutral=False),
    Field("return_lse", "engine", Flag(), "the log-sum-exp is returned too", neutral=False),
    Field("decode_query_len", "engine", Integer(), "longest query of a decode, in tokens", neutral=1),
    Field("dcp_size", "engine", Integer(), "ranks of decode context parallelism", neutral=1),
    Field("batch_invariant", "engine", Flag(), "results do not depend on what else is in the batch", neutral=False),
    Field(
        "host_lengths",
        "engine",
        Name(values=("exact", "upper_bound", "absent")),
        "sequence lengths known on the host",
        neutral="exact",
    ),
    Field("per_head_scales", "engine", Flag(), "quantization scales are per head", neutral=False),
    Field("output_quant", "engine", _QUANTIZED, "the output is quantized to this dtype"),
    Field("features", "engine", Names(each=_FEATURE), "open features, by dotted name", neutral=()),
    Field("device_type", "device", Word(), "device type, as torch names it", required=True),
    Field("vendor", "device", Word(), "who made the device; undeclared, a variant for cuda admits NVIDIA only"),
    Field("compute_capability", "device", Capability(), "CUDA compute capability"),
    Field("device_name", "device", Text(), "the device's product name", open=True),
    Field("num_multiprocessors", "device", Integer(), "streaming multiprocessors", open=True),
    Field("gqa_ratio", "derived", Integer(), "num_q_heads // num_kv_heads", open=True),
)

FIELDS: Final[Mapping[str, Field]] = MappingProxyType({item.name: item for item in _ALL})
"""Every field by name, in the order in which they are reported."""


def fields_of(*kinds: Kind) -> tuple[Field, ...]:
    """Return the fields of these kinds, in table order."""
    return tuple(item for item in _ALL if item.kind in kinds)


def near(name: str, names: Mapping[str, object] | tuple[str, ...] | list[str] | set[str] | frozenset[str]) -> str:
    """Return "; did you mean 'x'?" where a name is close to one of `names`, else an empty text."""
    matches = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
