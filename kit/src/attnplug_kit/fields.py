"""How the kit tests each field of requests: one row for each."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import field, frozen
from attrs.validators import deep_iterable, in_

if TYPE_CHECKING:
    from collections.abc import Mapping

WORDS: Final = MappingProxyType(
    {
        "plain": "every backend declares it: each value is in plain attention of the basic tier",
        "scores": "it changes scores or shows them: each value is at the ends of pages, in the basic tier",
        "effect": "it changes the output: a request without it has another one",
        "long": "kernels may read it for each key: each value is in long sequences",
        "splits": "kernels may split keys by it: each value is in a test of batch invariance",
        "steps": "each value is in chunked prefills and in advanced steps",
        "layers": "each layer has a separate tensor or scale for it: each value is in builders of two layers",
        "cache": "it forms the KV cache: each value is in tests of what is written where",
        "graphs": "a captured graph fixes it: each value is in replays",
        "sizes": "graph buffers and workspaces have sizes by it: two values share a state",
        "elsewhere": "separate tests cover it, and it is not combined with others",
    }
)
"""The tests that a field may be in."""

OF_RECORDS: Final = MappingProxyType(
    {
        "kv_cache_dtype": "fp8_ds_mla",
        "latent": True,
        "dtype": "bfloat16",
        "head_size": 576,
        "head_size_v": 512,
        "num_kv_heads": 1,
    }
)
"""What a layer with a KV cache of records requests."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@frozen(kw_only=True)
class Row:
    """
    How the kit tests a field.

    Attributes:
        tests: The `WORDS` of its tests, besides those of every declared value.
        wrong: The backend of the kit's own tests that is wrong in it, and is caught.
        unreachable: Why no test can request it; empty for all but a few.
        samples: Values that are requested of a declared range, besides its ends.
        always: Values that are requested though no manifest declares the field.
        odd: Values that few backends declare: one that does not has to refuse them.
        large: Values that hide keys of a long sequence; empty where no value does.
        drawn: The values of random cases, the plainest first.
        compiled: Whether a variant with just-in-time compilation has a kernel for each *value*, or for its *presence*.
        absolute: Whether the result depends on scores, and not on their differences alone.
    """

    tests: frozenset[str] = field(default="", converter=_words, validator=deep_iterable(in_(WORDS)))
    wrong: str = ""
    unreachable: str = ""
    samples: tuple[Any, ...] = ()
    always: tuple[Any, ...] = ()
    odd: tuple[Any, ...] = ()
    large: tuple[int, ...] = ()
    drawn: tuple[Any, ...] = ()
    compiled: Literal["", "value", "presence"] = ""
    absolute: bool = False


_PATTERNS: Final = (
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 1, "vert_stride": 3},
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 0, "vert_stride": 2},
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 2, "vert_stride": 3, "homo_head": True},
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 1, "vert_stride": 4, "homo_head_group": True},
    {"max_seqlen": 4096, "block_size": 64, "local_blocks": 2, "vert_stride": 8},
)

# Random cases draw their fields in this order.
ROWS: Final[Mapping[str, Row]] = MappingProxyType(
    {
        "head_size": Row(
            tests="plain sizes", samples=(64, 128, 80, 40), odd=(7,), compiled="value", wrong="wrong_at_odd_sizes"
        ),
        "num_q_heads": Row(odd=(13,), wrong="wrong_gqa"),
        "num_kv_heads": Row(tests="sizes", samples=(2, 1), always=(2,), wrong="loses_heads"),
        "gqa_ratio": Row(tests="plain sizes", always=(1, 2, 4, 7, 8), wrong="wrong_gqa"),
        "dtype": Row(tests="plain splits cache", compiled="value", wrong="rounds_float32"),
        "attn_type": Row(
            drawn=("decoder", "encoder", "encoder_only", "encoder_decoder"),
            odd=("encoder_only",),
            compiled="value",
            wrong="causal_encoders",
        ),
        "sliding_window": Row(
            tests="scores effect long splits steps graphs",
            samples=(7, 1, 64),
            odd=(7,),
            large=(100, 1024, 4096),
            drawn=(None, 1, 3, 17, 64),
            compiled="presence",
            wrong="window_off_by_one",
        ),
        "attention_chunk": Row(
            tests="scores effect long steps graphs",
            samples=(16, 5),
            odd=(16,),
            large=(100, 512, 2048),
            drawn=(None, 16, 32, 5),
            compiled="presence",
            wrong="ignores_chunk",
        ),
        "logits_soft_cap": Row(
            tests="scores effect long steps graphs",
            samples=(2.0, 30.0),
            odd=(30.0,),
            drawn=(None, 2.0, 30.0),
            compiled="presence",
            absolute=True,
            wrong="forgets_soft_cap",
        ),
        "alibi": Row(
            tests="scores effect long steps layers graphs",
            drawn=(None, "linear", "sqrt"),
            compiled="value",
            wrong="slopes_without_root",
        ),
        "sinks": Row(
            tests="scores effect long splits steps layers graphs",
            drawn=(False, True),
            compiled="value",
            absolute=True,
            wrong="ignores_sinks",
        ),
        "head_size_v": Row(
            tests="cache", samples=(24, 128), odd=(24,), drawn=(None, 8, 24), compiled="value", wrong="cuts_value_heads"
        ),
        "causal": Row(tests="effect", drawn=(True, False), compiled="value", wrong="always_causal"),
        "block_sparse": Row(
            tests="effect long graphs", samples=_PATTERNS, odd=({"kit": 1},), compiled="value", wrong="ignores_pattern"
        ),
        "custom_mask": Row(tests="effect graphs", drawn=(False, True), compiled="value", wrong="ignores_mask"),
        "attn_bias": Row(tests="effect", compiled="value", wrong="ignores_bias"),
        "mm_prefix": Row(tests="effect graphs", drawn=(False, True), compiled="value", wrong="hides_later_in_spans"),
        "latent": Row(
            tests="plain scores long splits steps cache graphs",
            drawn=(False, True),
            odd=(True,),
            compiled="value",
            wrong="writes_rope_first",
        ),
        "topk": Row(
            tests="plain scores effect long splits steps layers graphs",
            samples=(5, 64, 2048),
            odd=(7,),
            drawn=(None, 5, 64),
            compiled="presence",
            wrong="selects_causally",
        ),
        "kv_sharing": Row(drawn=(False, True), wrong="clears_shared_slots"),
        "decode_query_len": Row(samples=(2, 5), odd=(2, 64), drawn=(1, 2, 5), wrong="non_causal_decodes"),
        "kv_cache_dtype": Row(
            tests="long splits steps layers cache graphs",
            drawn=("auto", "fp8_e4m3", "fp8_e5m2"),
            compiled="value",
            wrong="keeps_wide_cache",
        ),
        "per_head_scales": Row(tests="steps layers cache graphs", wrong="first_heads_scale"),
        "paged": Row(tests="plain long splits", always=(True, False), wrong="reads_stale_block"),
        "phases": Row(tests="splits", wrong="needs_prefills"),
        "block_size": Row(tests="plain cache sizes", samples=(16, 1, 12), wrong="wrong_at_odd_blocks"),
        "kv_layout": Row(tests="plain cache graphs", wrong="tokens_first_in_memory"),
        "kv_cache_form": Row(tests="plain cache graphs", wrong="dense_tokens_in_packed"),
        "cudagraph": Row(tests="elsewhere", wrong="stale_replay"),
        "cascade": Row(wrong="loses_shared_prefix"),
        "return_lse": Row(tests="scores long splits steps graphs", wrong="lse_base_2"),
        "dcp_size": Row(
            odd=(2,), unreachable="the kit runs in one process, and decode context parallelism needs several ranks"
        ),
        "batch_invariant": Row(wrong="splits_by_batch_size"),
        "seq_lens_cpu_kind": Row(tests="elsewhere", wrong="trusts_seq_lens_cpu"),
        "query_lens_cpu_kind": Row(wrong="averages_queries"),
        "kv_in_cache": Row(wrong="writes_zero_rows"),
        "unquantized_queries": Row(
            unreachable="it changes nothing where queries are not quantized; making a layer refuses other classes"
        ),
        "output_quant": Row(unreachable="the oracle's outputs are not quantized"),
        "features": Row(odd=(("kit.nobody_has_this",),), wrong="wrong_with_feature"),
    }
)
"""The row of every field of the model and the engine, and of those that follow from them."""

CUTS: Final = tuple(name for name, row in ROWS.items() if row.large)
"""Fields without an effect on sequences that are no longer than their value."""


def tested(word: str) -> tuple[str, ...]:
    """Return the fields that are in the tests of a word of `WORDS`."""
    return tuple(name for name, row in ROWS.items() if word in row.tests)
