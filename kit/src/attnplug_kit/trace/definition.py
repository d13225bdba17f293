"""A layer as a definition of FlashInfer Trace: axes, inputs and outputs by name, and a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.errors import RequestError
from attnplug_kit.trace.reference import reference_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.request import Requirements

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
    inputs: Mapping[str, tuple[tuple[str, ...] | None, str]]
    outputs: Mapping[str, tuple[tuple[str, ...] | None, str]]
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
        axes = {n: {"type": "var"} if v is None else {"type": "const", "value": v} for n, v in self.axes.items()}
        return {
            "name": self.name,
            "op_type": self.op_type,
            "description": "Exported by attnplug. The LSE is to base 2"
            + (", and includes the sink." if "sinks" in self.inputs else "."),
            "tags": list(self.tags),
            "axes": axes,
            "constraints": [text for text in _constraints(self) if text],
            "inputs": _specs(self.inputs),
            "outputs": _specs(self.outputs),
            "reference": self.reference,
        }


def _specs(tensors: Mapping[str, tuple[tuple[str, ...] | None, str]]) -> dict[str, Any]:
    return {n: {"shape": None if a is None else list(a), "dtype": dtype} for n, (a, dtype) in tensors.items()}


def _constraints(definition: Definition) -> tuple[str, ...]:
    keys = "total_kv" if definition.op_type == "gqa_ragged" else "num_kv_indices"
    return (
        "len_indptr == batch_size + 1" if "batch_size" in definition.axes else "",
        "" if definition.is_decode else "total_q == qo_indptr[-1].item()",
        f"{keys} == kv_indptr[-1].item()",
    )


def definitions_of(layer: Requirements) -> tuple[Definition, ...]:
    """
    Return the definitions of a layer: one for decodes, and one for batches with longer queries, as it has these phases.

    Args:
        layer: The layer on one rank. Without a block size, pages have `DEFAULT_BLOCK_SIZE` tokens.

    Raises:
        RequestError: The format cannot express a field.
    """
    _refuse(layer)
    paged = bool(layer.paged)
    stages = [stage for stage in ("decode", "prefill") if stage in layer.phases] if paged else ["prefill"]
    return tuple(_definition(layer, stage) for stage in stages)


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


def _definition(layer: Requirements, stage: str) -> Definition:
    op_type = "mla_paged" if layer.latent else "gqa_paged" if layer.paged else "gqa_ragged"
    axes = _axes(layer, op_type, stage)
    inputs, outputs = _tensors(layer, op_type, stage)
    tags = [f"stage:{stage}", *(f"attnplug:{n}={v}" for n, v in layer.to_dict().items() if n in _TAGGED)]
    name = "_".join([op_type, "decode" if stage == "decode" else "prefill_causal", *_name_parts(layer, axes)])
    reference = reference_text(op_type, tuple(inputs), layer.sliding_window)
    return Definition(name, op_type, axes, inputs, outputs, tuple(tags), reference)


def _axes(layer: Requirements, op_type: str, stage: str) -> dict[str, int | None]:
    size_v = layer.head_size_v or layer.head_size
    axes: dict[str, int | None] = {"num_qo_heads": layer.num_q_heads}
    if layer.latent:
        axes |= {"head_dim_ckv": size_v, "head_dim_kpe": layer.head_size - size_v}
    else:
        axes |= {"num_kv_heads": layer.num_kv_heads, "head_dim": layer.head_size}
        axes |= {} if size_v == layer.head_size else {"head_dim_v": size_v}
    if layer.paged:
        axes["page_size"] = layer.block_size or DEFAULT_BLOCK_SIZE
    if layer.sliding_window is not None:
        axes["sliding_window"] = layer.sliding_window
    variable = [] if stage == "decode" else ["total_q"]
    variable += ["total_kv"] if op_type == "gqa_ragged" else ["batch_size", "num_pages", "num_kv_indices"]
    return axes | dict.fromkeys([*variable, "len_indptr"])


def _tensors(layer: Requirements, op_type: str, stage: str) -> tuple[dict[str, Any], dict[str, Any]]:
    dtype, rows = layer.dtype, "batch_size" if stage == "decode" else "total_q"
    size_v = "head_dim" if layer.head_size_v in (None, layer.head_size) else "head_dim_v"
    if op_type == "mla_paged":
        size_v = "head_dim_ckv"
        inputs: dict[str, Any] = {
            "q_nope": ((rows, "num_qo_heads", "head_dim_ckv"), dtype),
            "q_pe": ((rows, "num_qo_heads", "head_dim_kpe"), dtype),
            "ckv_cache": (("num_pages", "page_size", "head_dim_ckv"), dtype),
            "kpe_cache": (("num_pages", "page_size", "head_dim_kpe"), dtype),
        }
    else:
        names, first = (("k", "v"), ("total_kv",)) if op_type == "gqa_ragged" else _PAGES
        inputs = {"q": ((rows, "num_qo_heads", "head_dim"), dtype)}
        inputs |= {
            name: ((*first, "num_kv_heads", size), dtype)
            for name, size in zip(names, ("head_dim", size_v), strict=True)
        }
    if stage != "decode":
        inputs["qo_indptr"] = (("len_indptr",), "int32")
    inputs["kv_indptr"] = (("len_indptr",), "int32")
    if op_type != "gqa_ragged":
        inputs["kv_indices"] = (("num_kv_indices",), "int32")
        inputs["kv_last_page_len"] = (("batch_size",), "int32")
    inputs["sm_scale"] = (None, "float32")
    if layer.logits_soft_cap is not None:
        inputs["logits_soft_cap"] = (None, "float32")
    if layer.sinks:
        inputs["sinks"] = (("num_qo_heads",), "float32")
    outputs = {"output": ((rows, "num_qo_heads", size_v), dtype), "lse": ((rows, "num_qo_heads"), "float32")}
    return inputs, outputs


_PAGES: Final = (("k_cache", "v_cache"), ("num_pages", "page_size"))


def _name_parts(layer: Requirements, axes: Mapping[str, int | None]) -> list[str]:
    short = {"num_qo_heads": "h", "num_kv_heads": "kv", "head_dim": "d", "head_dim_v": "vd", "head_dim_ckv": "ckv"}
    short |= {"head_dim_kpe": "kpe", "page_size": "ps", "sliding_window": "w"}
    parts = [f"{short[name]}{value}" for name, value in axes.items() if value is not None]
    parts += ["cap"] if layer.logits_soft_cap is not None else []
    parts += ["sinks"] if layer.sinks else []
    return parts if layer.dtype == "bfloat16" else [*parts, layer.dtype]
