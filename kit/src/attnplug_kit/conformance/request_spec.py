"""One thing that the kit asks a backend for: fields that differ from neutral, and a batch that exercises them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import frozen

from attnplug.errors import RequestError
from attnplug.request import FIELDS, Requirements
from attnplug_kit.oracle.cases import Case

if TYPE_CHECKING:
    from collections.abc import Mapping

_CASE: Final = {item.name for item in attrs.fields(Case)} & set(FIELDS) - {"num_q_heads", "block_size"}
_PAGED: Final = ("block_size", "kv_layout")
NARROW: Final = ("fp8_e4m3", "fp8_e5m2")
"""The cache dtypes whose rounding the oracle knows, beside the layer's own dtype."""


@frozen
class RequestSpec:
    """
    What is asked for.

    Attributes:
        pairs: Fields of the requirements with their values, sorted. `gqa_ratio` stands for `num_q_heads`.
    """

    pairs: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> RequestSpec:
        """Return what a mapping asks for; None asks for nothing, and without pages nothing is asked of them."""
        without = () if fields.get("paged", True) else _PAGED
        return cls(tuple(sorted((n, v) for n, v in fields.items() if v is not None and n not in without)))

    @property
    def fields(self) -> dict[str, Any]:
        """The fields, by name."""
        return dict(self.pairs)

    def and_(self, **fields: Any) -> RequestSpec:
        """Return an ask for these fields too; None takes one away."""
        return RequestSpec.of({**self.fields, **fields})

    def requirements(self) -> Requirements | None:
        """Return the requirements, or None where the fields contradict each other or the kit has no batch for them."""
        fields = self.fields
        if _is_without_a_batch(fields):
            return None
        fields["num_q_heads"] = fields["num_kv_heads"] * fields.pop("gqa_ratio", 1)
        fields["attn_type"] = fields.get("attn_type", "decoder")
        try:
            return Requirements(**fields)
        except RequestError:
            return None

    @property
    def engine(self) -> dict[str, Any]:
        """The fields that no case knows: pass them to `Case.requirements`."""
        names = set(FIELDS) - _CASE - {"gqa_ratio", "cascade"}
        return {name: value for name, value in self.pairs if name in names}

    def case(self, seed: int, **fixed: Any) -> Case:
        """
        Return a batch that exercises what is asked for: decodes and prefills with and without context.

        Args:
            seed: Of lengths and tensors.
            fixed: Fields of the case that are as given.
        """
        fields = self.fields
        case = {name: value for name, value in fields.items() if name in _CASE}
        case["num_q_heads"] = fields["num_kv_heads"] * fields.get("gqa_ratio", 1)
        case["block_size"] = fields.get("block_size", 16)
        case["causal"] = fields.get("causal", fields.get("attn_type", "decoder") == "decoder")
        if fields.get("kv_cache_dtype", "auto") in NARROW:
            case |= {"k_scale": 0.3, "v_scale": 0.7}
        made = Case(**{**case, **_lengths(fields, random.Random(seed)), "seed": seed, **fixed})
        return made.with_shared_prefix(_prefix_blocks(made)) if fields.get("cascade") else made

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.pairs)


def _is_without_a_batch(fields: Mapping[str, Any]) -> bool:
    narrow = fields.get("kv_cache_dtype", "auto") in NARROW
    cross = fields.get("attn_type") == "encoder_decoder"
    dense = not fields.get("paged", True)
    inexact = fields.get("seq_lens_cpu_kind", "exact") != "exact"
    return (
        (bool(fields.get("per_head_scales")) and not narrow)
        or (dense and fields.get("phases") == ("decode",))
        or (cross and bool(fields.get("cascade")))
        or (cross and not dense and bool(fields.get("custom_mask")))
        or (inexact and (dense or cross or bool(fields.get("custom_mask"))))
    )


def _prefix_blocks(case: Case) -> int:
    return max(1, 32 // case.block_size)


def _lengths(fields: Mapping[str, Any], source: random.Random) -> dict[str, Any]:
    """Two decodes, then two prefills, of which one has no context; or those of the one phase that is asked for."""
    longest, phases = fields.get("decode_query_len", 1), fields.get("phases", ("prefill", "decode"))
    decodes = [source.randint(1, longest), longest] if "decode" in phases else []
    prefills = [source.randint(longest + 1, longest + 9), longest + 17] if "prefill" in phases else []
    query_lens = (*decodes, *prefills)
    context_lens = [source.choice((3, 18, 41)) for _ in query_lens]
    context_lens[-1] = 0 if prefills else context_lens[-1]
    lens: dict[str, Any] = {"query_lens": query_lens, "context_lens": tuple(context_lens), "num_padding_tokens": 2}
    if fields.get("attn_type") in ("encoder", "encoder_only"):
        lens["context_lens"] = (0,) * len(query_lens)
    if fields.get("attn_type") == "encoder_decoder":
        lens["encoder_lens"] = tuple(source.randint(1, 40) for _ in query_lens)
    return lens
