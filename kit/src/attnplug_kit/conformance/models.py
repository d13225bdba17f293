"""Layers of published models: their heads, windows, chunks and soft caps, over sequences that are longer than these."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.pairwise import needs_no_other_kernel
from attnplug_kit.conformance.serving import serve
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.fields import CUTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.report import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject

_GEMMA: Final = {"head_size": 256, "num_kv_heads": 8, "gqa_ratio": 2, "logits_soft_cap": 50.0}
_GPT_OSS: Final = {"head_size": 64, "num_kv_heads": 8, "gqa_ratio": 8, "sinks": True}

# From the config.json of each model: hidden_size or head_dim, num_attention_heads, num_key_value_heads, sliding_window,
# attn_logit_softcapping, attention_chunk_size.
MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "Llama-3-8B": {"head_size": 128, "num_kv_heads": 8, "gqa_ratio": 4},
    "Gemma-2-9B": _GEMMA,
    "Gemma-2-9B sliding": {**_GEMMA, "sliding_window": 4096},
    "gpt-oss-20b": _GPT_OSS,
    "gpt-oss-20b sliding": {**_GPT_OSS, "sliding_window": 128},
    "Mistral-7B": {"head_size": 128, "num_kv_heads": 8, "gqa_ratio": 4, "sliding_window": 4096},
    "Llama-4-Scout": {"head_size": 128, "num_kv_heads": 8, "gqa_ratio": 5, "attention_chunk": 8192},
    "Qwen2-0.5B": {"head_size": 64, "num_kv_heads": 2, "gqa_ratio": 7},
    "StarCoder": {"head_size": 128, "num_kv_heads": 1, "gqa_ratio": 48},
    "Phi-3-mini": {"head_size": 96, "num_kv_heads": 32, "gqa_ratio": 1},
}
"""The fields of a layer, by model; of its sliding layers apart."""

_LONGEST: Final = 2100
"""Tokens of the longest sequence of a layer without a window or a chunk."""

_BEYOND: Final = 1024
"""Tokens of the longest sequence beyond a window or a chunk: enough to find one that is ignored, or smaller."""

_PREFILL: Final = 40
"""Tokens of the prefill: more than a tile of 32 rows. Tests of long sequences have more, of shorter ones."""


def _layers(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return the layers that the subject serves."""
    found = {name: _layer(subject, fields) for name, fields in MODELS.items()}
    return {name: spec for name, spec in found.items() if spec is not None}


def _layer(subject: Subject, fields: Mapping[str, Any]) -> RequestSpec | None:
    """Return the request for a layer, or None."""
    # A variant that compiles its kernels gets another dtype and head size, if only these have a kernel that is needed
    # anyway. A block-sparse pattern has its own longest sequence, and an encoder no context.
    variant = subject.candidate.variant
    compiles = variant is not None and variant.jit is not None
    for dtype, size in _sizes(subject, fields["head_size"], all_of_them=compiles):
        spec = field_values_of(subject).spec(**{**fields, "dtype": dtype, "head_size": size})
        if spec is None or {"attn_type", "block_sparse"} & set(spec.fields):
            continue
        if not compiles or needs_no_other_kernel(subject, spec):
            return spec
    return None


def _sizes(subject: Subject, head_size: int, *, all_of_them: bool) -> Iterator[tuple[str, int]]:
    """Yield the dtypes and head sizes to try, those of models first."""
    declared = field_values_of(subject).values()
    dtypes = sorted(declared["dtype"], key=("bfloat16", "float16", "float32").index)
    sizes = dict.fromkeys((head_size, *(declared["head_size"] if all_of_them else ())))
    yield from ((dtype, size) for size, dtype in product(sizes, dtypes))


class Models(Tier):
    """Requests of published models, over thousands of tokens."""

    @over(_layers)
    def test_layer(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """A layer gives the oracle's output where its window or chunk hides a part of the sequence."""
        point = draw(point, keep=("kv_cache_dtype",))  # a layer fixes all but pages, and what hosts do
        fields = point.fields
        longest = max(_LONGEST, *(_BEYOND + fields.get(name, 0) for name in CUTS))
        lens = {"decode": ((1, 1), (longest, 300)), "prefill": ((_PREFILL,), (longest - _PREFILL,))}
        parts = [lens[phase] for phase in ("decode", "prefill") if phase in fields.get("phases", lens)]
        query_lens, context_lens = (sum(each, ()) for each in zip(*parts, strict=True))
        case = point.case(27, any_order=True, query_lens=query_lens, context_lens=context_lens, gain=2.0)
        serve(subject, point, record, case)
