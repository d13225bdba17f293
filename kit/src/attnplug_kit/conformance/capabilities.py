"""One tier for each declared capability, and each with each other one, against the float64 oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from attrs import evolve

from attnplug.request import FIELDS
from attnplug_kit.conformance.batch_invariance import require_same_bits
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.pairwise import covering_asks
from attnplug_kit.conformance.require import require
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.conformance.serving import load_for, plain, serve
from attnplug_kit.conformance.tier import Tier, over
from attnplug_kit.oracle.running import compare, limits_of
from attnplug_kit.oracle.scene import materialize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug_kit.conformance.record import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject

_ELSEWHERE: Final = ("cudagraph", "seq_lens_cpu_kind")
_AT_LENGTH: Final = (
    "sliding_window",
    "attention_chunk",
    "logits_soft_cap",
    "alibi",
    "sinks",
    "kv_cache_dtype",
    "return_lse",
    "paged",
    "block_sparse",
)
_SPLIT: Final = ("dtype", "kv_cache_dtype", "paged", "return_lse", "sinks", "sliding_window", "phases")
_HEADS: Final = 8


def _capabilities(subject: Subject) -> Mapping[str, RequestSpec]:
    asks = field_values_of(subject).asks.items()
    return {
        str(item): ask for item, ask in asks if FIELDS[item.field].kind != "device" and item.field not in _ELSEWHERE
    }


def _rows(subject: Subject) -> Mapping[str, RequestSpec]:
    return {f"{number:02}": ask for number, ask in enumerate(covering_asks(subject))}


def _long(subject: Subject) -> Mapping[str, RequestSpec]:
    asks = field_values_of(subject).asks.items()
    return {str(item): ask for item, ask in asks if item.field in _AT_LENGTH and "attn_type" not in ask.fields}


def _many_keys(ask: RequestSpec) -> dict[str, Any]:
    """The lengths of some requests that have many keys, in the phases that are asked for."""
    lens = {"decode": ((1, 1), (1100, 300)), "prefill": ((140,), (600,))}
    known = [lens[phase] for phase in ("decode", "prefill") if phase in ask.fields.get("phases", lens)]
    query_lens, context_lens = (sum(parts, ()) for parts in zip(*known, strict=True))
    return {"query_lens": query_lens, "context_lens": context_lens}


def _of_several_tokens(subject: Subject) -> Mapping[str, RequestSpec]:
    return {str(item): ask for item, ask in field_values_of(subject).asks.items() if item.field == "decode_query_len"}


def _in_company(subject: Subject) -> Mapping[str, RequestSpec]:
    """A plain ask for batch invariance, and one with each value for which kernels may split keys in another way."""
    menu = field_values_of(subject)
    names: dict[RequestSpec | None, str] = {}
    fields = {str(item): {item.field: item.value} for item in menu.asks if item.field in _SPLIT}
    for name, asked in {"plain": {}, **fields}.items():
        names.setdefault(menu.ask(batch_invariant=True, **asked), name)
    return {name: ask for ask, name in names.items() if ask is not None}


class Capabilities(Tier):
    """Every declared value that this device can reach."""

    def test_declared_values_are_served(self, subject: Subject) -> None:
        """No declared value is refused, by the manifest's own rules, in every request that asks for it."""
        unserved = [f"{item.capability} ({item.because})" for item in field_values_of(subject).unserved]
        require(not unserved, f"{subject}: declared, and refused in every request: {'; '.join(unserved)}")

    @over(_capabilities)
    def test_capability(self, subject: Subject, record: Record, point: Any) -> None:
        """A declared value gives the oracle's output, and its LSE where that is served."""
        for seed in (11, 12):
            serve(subject, point, record, point.case(seed, gain=1.0 if seed % 2 else 4.0))

    @over(_rows)
    def test_pairs(self, subject: Subject, record: Record, point: Any) -> None:
        """Every two declared values that may be asked for together give the oracle's output."""
        serve(subject, point, record, point.case(seed=21))

    @over(_long)
    def test_long_sequences(self, subject: Subject, record: Record, point: Any) -> None:
        """Many keys, which kernels split among each other and merge, and more rows than a tile has."""
        serve(subject, point, record, point.case(seed=23, **_many_keys(point)))

    def test_bound_of_splits(self, subject: Subject) -> None:
        """Where a bound of splits is kept, whatever it is, every key is attended all the same."""
        ask = plain(subject)
        scene = materialize(ask.case(26, **_many_keys(ask)))
        backend = load_for(subject, ask, scene.case)
        if not backend.supports_max_num_splits:
            pytest.skip(f"{subject}: limits with a bound of splits are refused")
        for bound in (1, 3):
            rig = Rig(backend, scene, limits=evolve(limits_of(scene), max_num_splits=bound))
            try:
                compare(rig.run(scene), backend, scene)
            except AssertionError as error:
                raise AssertionError(f"{subject}: limits with max_num_splits={bound}: {error}") from error

    def test_many_requests(self, subject: Subject, record: Record) -> None:
        """More requests than a warp has threads, with more KV heads than elsewhere where they may be as many."""
        ask = field_values_of(subject).ask(num_kv_heads=_HEADS) or plain(subject)
        query_lens, context_lens = (*[1] * 36, *[3, 18] * 2), tuple((7 * request) % 50 for request in range(40))
        serve(subject, ask, record, ask.case(seed=24, query_lens=query_lens, context_lens=context_lens))

    @over(_of_several_tokens)
    def test_decodes_of_several_tokens(self, subject: Subject, record: Record, point: Any) -> None:
        """Where a decode has several tokens, a batch of decodes alone is still causal in each."""
        longest = point.fields["decode_query_len"]
        lens: dict[str, Any] = {"query_lens": (longest, 1, longest), "context_lens": (33, 0, 7)}
        serve(subject, point, record, point.case(seed=25, **lens))

    @over(_in_company)
    def test_batch_invariant(self, subject: Subject, point: Any) -> None:
        """A request gives the same bits alone and among others, wherever it stands, where that is declared."""
        require_same_bits(subject, point, seed=22)
