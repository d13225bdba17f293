"""A layer as a definition of FlashInfer Trace: axes, inputs and outputs by name, and a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attrs import field, frozen

from attnplug.errors import RequestError
from attnplug_kit.trace.reference import reference_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.request import Requirements

    Tensor: TypeAlias = tuple[tuple[str, ...] | None, str]  # axes, None for a scalar, and dtype

DEFAULT_BLOCK_SIZE: Final = 16
"""The page size of a definition whose layer leaves it open; the built-in backend agrees to it."""

_MATHEMATICS: Final = frozenset(
    ("head_size", "head_size_v", "num_q_heads", "num_kv_heads", "dtype", "sliding_window", "logits_soft_cap", "sinks")
) | {"latent", "paged", "block_size", "phases"}
"""The fields that axes, inputs and the reference express."""

_TAGGED: Final = frozenset(
    ("cudagraph", "return_lse", "decode_query_len", "seq_lens_cpu_kind", "query_lens_cpu_kind", "kv_in_cache")
) | {"batch_invariant", "cascade", "kv_sharing", "kv_cache_form", "unquantized_queries"}
"""The fields that change no result: a definition has them as tags."""

_DTYPES: Final = ("float32", "float16", "bfloat16")
_SHORT: Final = {
    "num_qo_heads": "h",
    "num_kv_heads": "kv",
    "head_dim": "d",
    "head_dim_v": "vd",
    "head_dim_ckv": "ckv",
} | {"head_dim_kpe": "kpe", "page_size": "ps", "sliding_window": "w"}


@frozen
class Definition:
    """
    A definition.

    Attributes:
        name: Its name, which follows from the constant axes.
        op_type: gqa_paged, mla_paged or gqa_ragged.
        axes: The value of each constant axis; None for a variable one.
        inputs: Axes and dtype of each input, in the order of the reference's parameters; no axes for a scalar.
        outputs: The same of the outputs.
        tags: What else the layer requests.
        reference: The code of the reference.
    """

    name: str
    op_type: str
    axes: Mapping[str, int | None]
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    tags: tuple[str, ...] = ()
    reference: str = field(default="", repr=False)

    @property
    def is_decode(self) -> bool:
        """Whether each request has one query, so that no offsets of queries are an input."""
        return "qo_indptr" not in self.inputs

    @property
    def path(self) -> str:
        """The place of its file in a dataset."""
        return f"definitions/{self.op_type}/{self.name}.json"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, as the format has them."""
        keys = "total_kv" if self.op_type == "gqa_ragged" else "num_kv_indices"
        constraints = ["len_indptr == batch_size + 1"] if "batch_size" in self.axes else []
        constraints += [] if self.is_decode else ["total_q == qo_indptr[-1].item()"]
        inputs, outputs = (
            {
                name: {"shape": None if axes is None else list(axes), "dtype": dtype}
                for name, (axes, dtype) in each.items()
            }
            for each in (self.inputs, self.outputs)
        )
        return {
            "name": self.name,
            "op_type": self.op_type,
            "description": "Exported by attnplug. The LSE is to base 2"
            + (", and includes the sink." if "sinks" in self.inputs else "."),
            "tags": list(self.tags),
            "axes": {n: {"type": "var"} if v is None else {"type": "const", "value": v} for n, v in self.axes.items()},
            "constraints": [*constraints, f"{keys} == kv_indptr[-1].item()"],
            "inputs": inputs,
            "outputs": outputs,
            "reference": self.reference,
        }


def definitions_of(layer: Requirements) -> tuple[Definition, ...]:
    """
    Return the definitions of a layer: one for decodes, and one for batches with longer queries, as it has these phases.

    Args:
        layer: The layer on one rank. Without a block size, pages have `DEFAULT_BLOCK_SIZE` tokens.

    Raises:
        RequestError: The format cannot express a field.
    """
    _refuse(layer)
    stages = [stage for stage in ("decode", "prefill") if stage in layer.phases] if layer.paged else ["prefill"]
    return tuple(_definition(layer, is_decode=stage == "decode") for stage in stages)


def _refuse(layer: Requirements) -> None:
    """Refuse what would be dropped."""
    given = {name: value for name, value in layer.to_dict().items() if name not in _MATHEMATICS | _TAGGED}
    if given.get("kv_layout") == "NHD":  # in which a definition has its pages
        del given["kv_layout"]
    if layer.kv_cache_dtype == layer.dtype:
        given.pop("kv_cache_dtype", None)
    if layer.causal and layer.attn_type == "decoder":  # as each definition of these types is
        given.pop("causal", None)
    if layer.dtype not in _DTYPES:
        given["dtype"] = layer.dtype
    if layer.latent and not layer.paged:
        given |= {"latent": True, "paged": False}
    if given:
        raise RequestError(
            f"FlashInfer Trace cannot express {', '.join(f'{name}={value!r}' for name, value in given.items())}",
            f"a definition has {', '.join(sorted(_MATHEMATICS))}, of {', '.join(_DTYPES)} and NHD pages",
            "export the layers without these fields",
        )


def _definition(layer: Requirements, *, is_decode: bool) -> Definition:
    size, size_v = layer.head_size, layer.head_size_v or layer.head_size
    axes: dict[str, int | None] = {"num_qo_heads": layer.num_q_heads}
    rows = ("batch_size" if is_decode else "total_q", "num_qo_heads")
    pages = ("num_pages", "page_size")
    if layer.latent:
        op_type, value = "mla_paged", "head_dim_ckv"
        axes |= {value: size_v, "head_dim_kpe": size - size_v}
        shapes = {"q_nope": (*rows, value), "q_pe": (*rows, "head_dim_kpe")}
        shapes |= {"ckv_cache": (*pages, value), "kpe_cache": (*pages, "head_dim_kpe")}
    else:
        op_type, suffix, first = ("gqa_paged", "_cache", pages) if layer.paged else ("gqa_ragged", "", ("total_kv",))
        value = "head_dim" if size_v == size else "head_dim_v"
        axes |= {"num_kv_heads": layer.num_kv_heads, "head_dim": size, value: size_v}
        shapes = {"q": (*rows, "head_dim"), f"k{suffix}": (*first, "num_kv_heads", "head_dim")}
        shapes |= {f"v{suffix}": (*first, "num_kv_heads", value)}
    if layer.paged:
        axes["page_size"] = layer.block_size or DEFAULT_BLOCK_SIZE
    if layer.sliding_window is not None:
        axes["sliding_window"] = layer.sliding_window
    parts = [op_type, "decode" if is_decode else "prefill_causal", *(f"{_SHORT[n]}{v}" for n, v in axes.items())]
    parts += ["cap"] if layer.logits_soft_cap is not None else []
    parts += ["sinks"] if layer.sinks else []
    parts += [] if layer.dtype == "bfloat16" else [layer.dtype]
    variable = [] if is_decode else ["total_q"]
    variable += ["batch_size", "num_pages", "num_kv_indices"] if layer.paged else ["total_kv"]
    axes |= dict.fromkeys([*variable, "len_indptr"])
    inputs = {name: (shape, layer.dtype) for name, shape in shapes.items()} | _other_inputs(layer, is_decode=is_decode)
    outputs = {"output": ((*rows, value), layer.dtype), "lse": (rows, "float32")}
    tags = [f"stage:{'decode' if is_decode else 'prefill'}"]
    tags += [f"attnplug:{name}={value}" for name, value in layer.to_dict().items() if name in _TAGGED]
    reference = reference_text(op_type, tuple(inputs), layer.sliding_window)
    return Definition("_".join(parts), op_type, axes, inputs, outputs, tuple(tags), reference)


def _other_inputs(layer: Requirements, *, is_decode: bool) -> dict[str, Tensor]:
    """Return the offsets, pages and scalars."""
    found: dict[str, Tensor] = {} if is_decode else {"qo_indptr": (("len_indptr",), "int32")}
    found["kv_indptr"] = (("len_indptr",), "int32")
    if layer.paged:
        found |= {"kv_indices": (("num_kv_indices",), "int32"), "kv_last_page_len": (("batch_size",), "int32")}
    found["sm_scale"] = (None, "float32")
    if layer.logits_soft_cap is not None:
        found["logits_soft_cap"] = (None, "float32")
    return found | ({"sinks": (("num_qo_heads",), "float32")} if layer.sinks else {})
