"""The backend through its public interface, beside attention in float64: launches, features and compilations."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from attrs import evolve, field, frozen

import attnplug
from attnplug import Device, Requirements
from attnplug.contract import Batch, CacheTensor, GraphShape, KVCache, Layer, Limits, split_kv, torch_dtype
from attnplug.contract.inputs.kv_cache import CacheSpec
from attnplug.ops import Kernel
from attnplug.request.domains import PER_TOKEN_HEAD
from attnplug_kit.oracle import Case, SceneRunner, attend, materialize
from attnplug_kit.oracle.rounding import by_row
from attnplug_triton import launch
from attnplug_triton.backend import TritonBackend
from tests.backends import requests
from tests.backends.requests import CANARY
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS, bounds_checked

pytestmark = [*MARKS, pytest.mark.usefixtures("registered")]

MIXED = ([20, 1, 3, 33, 1], [20, 50, 3, 70, 130])
"""Query lengths and sequence lengths of requests in no order."""


@frozen(eq=False)
class Requests(requests.Requests):
    """
    Requests of a layer.

    Attributes:
        window: Tokens that a token attends to; None for all.
        chunk: Tokens of a chunk; None for no chunks.
        soft_cap: The soft cap; None for none.
        alibi: linear, sqrt, or None.
        has_sinks: Whether heads have sinks.
        causal: Whether attention is causal.
        latent: Elements of a value, the first ones of its key; None for values apart.
        attn_type: As in the requirements. The keys of cross attention are an encoder's, `seq_lens` of them.
        spans: The first and the last position of the spans of each request.
        has_mask: Whether there is a custom mask, which hides half of the keys, and all of them from some tokens.
        paged: Whether the context is in a KV cache; otherwise each call has all K/V.
    """

    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    alibi: str | None = None
    has_sinks: bool = False
    causal: bool = field(default=True)
    latent: int | None = None
    attn_type: str = "decoder"
    spans: list[list[tuple[int, int]]] | None = None
    has_mask: bool = False
    paged: bool = True

    def __attrs_post_init__(self):
        super().__attrs_post_init__()
        if self.latent:
            self.put("values", [keys[..., : self.latent] for keys in self.keys])

    @property
    def slopes(self):
        return torch.logspace(-1, -4, self.kv_heads * self.group, base=2.0) if self.alibi else None

    @property
    def sinks(self):
        return torch.linspace(-1, 2, self.kv_heads * self.group) if self.has_sinks else None

    @property
    def both_sides(self):
        """The tokens left and right of a token that its window has."""
        return self.window - 1, self.window - 1 if self.attn_type == "encoder_only" else 0

    @property
    def masks(self):
        """The custom mask of each request; None for each without."""
        if not self.has_mask:
            return [None] * len(self.query_lens)
        generator = torch.Generator().manual_seed(2)
        share = (torch.tensor([[0.0], [0.5], [1.0]]) for _ in self.query_lens)
        sizes = zip(self.query_lens, self.seq_lens, share, strict=True)
        return [torch.rand(new, keys, generator=generator) < each.repeat(new, 1)[:new] for new, keys, each in sizes]

    @property
    def ranges(self):
        """The span of each new token, of each request."""
        found = []
        for new, length, spans in zip(self.query_lens, self.seq_lens, self.spans, strict=True):
            rows = torch.full((length, 2), -1, dtype=torch.int32)
            for first, last in spans:
                rows[first : last + 1] = torch.tensor([first, last])
            found.append(rows[length - new :])
        return found

    @property
    def is_cross(self):
        return self.attn_type == "encoder_decoder"

    @property
    def layer(self):
        tensors = {"alibi_slopes": self.slopes, "sinks": self.sinks}
        tensors = {name: None if it is None else it.to(DEVICE) for name, it in tensors.items()}
        return Layer(name="layer", scale=self.scale, **tensors)

    @property
    def requested(self):
        return {
            "head_size": self.size,
            "head_size_v": self.latent,
            "latent": bool(self.latent),
            "num_q_heads": self.kv_heads * self.group,
            "num_kv_heads": self.kv_heads,
            "dtype": self.dtype,
            "sliding_window": self.window,
            "attention_chunk": self.chunk,
            "logits_soft_cap": self.soft_cap,
            "alibi": self.alibi,
            "sinks": self.has_sinks,
            "causal": self.causal,
            "attn_type": self.attn_type,
            "custom_mask": self.has_mask,
            "mm_prefix": self.spans is not None,
            "paged": self.paged,
        }

    def expected(self):
        """Return outputs and LSEs in float64."""
        spans = self.ranges if self.spans else [None] * len(self.queries)
        rows = zip(self.queries, self.keys, self.values, strict=True)
        parts = [
            attend(
                *(tensor.cpu() for tensor in each),
                scale=self.scale,
                causal=self.causal,
                window=(-1, -1) if self.window is None else self.both_sides,
                attention_chunk=self.chunk,
                logits_soft_cap=self.soft_cap,
                alibi=self.alibi,
                alibi_slopes=self.slopes,
                sinks=self.sinks,
                spans=span,
                custom_mask=mask,
            )
            for each, span, mask in zip(rows, spans, self.masks, strict=True)
        ]
        return torch.cat([part.output for part in parts]), torch.cat([part.lse_with_sink for part in parts])


class Step:
    """A backend with one layer, and requests whose context is in its KV cache."""

    def __init__(self, case, page=16, max_num_splits=None, **requested):
        self.case, self.page = case, page
        pages = {"block_size": page, "kv_layout": "NHD"} if case.paged else {}
        fields = {**pages, "return_lse": True, **case.requested, **requested}
        device = Device.cpu() if INTERPRETED else None
        self.backend = attnplug.load(Requirements(**fields), device, backend="triton")
        self.impl = self.backend.make_impl(case.layer)
        self.limits = Limits(
            max_num_reqs=8, max_num_tokens=max(8, sum(case.query_lens)), max_seq_len=2048, max_num_splits=max_num_splits
        )
        self.state = self.backend.make_state(self.limits)
        self.builder = self.backend.make_builder([self.impl], self.state)

    def batch(self):
        case, page = self.case, self.page
        given = {"causal": case.causal}
        if case.has_mask:
            given["custom_mask"] = torch.cat([mask.flatten() for mask in case.masks]).to(DEVICE)
        if case.spans:
            ranges = torch.cat(case.ranges)
            given |= {"mm_prefix_range": ranges.to(DEVICE), "mm_prefix_range_cpu": ranges}
        if not case.paged:
            return Batch.from_lengths(case.query_lens, case.seq_lens, device=DEVICE, **given)
        table, count = case.block_table(page)
        parts = 1 if case.latent else 2
        cache = torch.full((parts, count, page, case.kv_heads, case.size), torch.nan, dtype=case.dtype, device=DEVICE)
        slots = []
        for request, (new, length) in enumerate(zip(case.query_lens, case.seq_lens, strict=True)):
            at = torch.arange(length)
            where = table[request, at // page].long() * page + at % page
            first = 0 if case.window is None else max(0, length - new - case.window + 1)
            if case.spans:
                first = min(
                    [first, *(low for low, high in case.spans[request] if low < length and high >= length - new)]
                )
            end = length if case.is_cross else length - new
            kept = at[(first <= at) & (at < end)]  # blocks before a window are freed
            for part, rows in enumerate((case.keys, case.values)[:parts]):
                cache[part].view(-1, case.kv_heads, case.size)[where[kept].to(DEVICE)] = rows[request][kept.to(DEVICE)]
            table[request, : first // page] = 0
            slots.append(where[end:])
        self.cache = cache
        given |= {"block_table": table, "slot_mapping": torch.cat(slots)}
        if case.is_cross:
            lens = torch.tensor(case.seq_lens, dtype=torch.int32)
            given |= {"encoder_seq_lens": lens.to(DEVICE), "encoder_seq_lens_cpu": lens}
        seq_lens = [new + 5 for new in case.query_lens] if case.is_cross else case.seq_lens
        return Batch.from_lengths(case.query_lens, seq_lens, device=DEVICE, **given)

    def run(self, metadata, padding=0):
        case = self.case
        query = torch.cat(case.queries)
        new = [0] * len(case.queries) if case.is_cross else case.query_lens
        new = new if case.paged else case.seq_lens
        key, value = (
            torch.cat([rows[len(rows) - count :] for rows, count in zip(part, new, strict=True)])
            for part in (case.keys, case.values)
        )
        rows = [torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, padding)) for tensor in (query, key, value)]
        if not sum(new):
            rows[1:] = None, None
        width = case.queries[0].shape[1] * (case.latent or case.size)
        out = torch.full((len(query) + padding, width), CANARY, dtype=case.dtype, device=DEVICE)
        lse = torch.full((len(query) + padding, query.shape[1]), CANARY, device=DEVICE)
        cache = None
        if case.latent:
            rows[2], tensors = None, {"k": self.cache[0], "v": self.cache[0, ..., : case.latent]}
        elif case.paged:
            tensors = split_kv(self.cache, "joint", "NHD", case.size)
        if case.paged:
            cache = self.backend.bind_cache(tensors)
        self.impl.forward(*rows, cache, metadata, out, lse=lse)
        return out.view(len(query) + padding, query.shape[1], -1).cpu(), lse.cpu()


def check(found, case):
    output, sums = case.expected()
    tolerance = 2e-2 if case.dtype == torch.bfloat16 else 3e-3
    torch.testing.assert_close(found[0].double()[: len(output)], output, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[1].double()[: len(output)], sums, rtol=1e-2, atol=1e-2)
    assert (found[0][len(output) :] == CANARY).all()
    assert (found[1][len(output) :] == CANARY).all()


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that ran."""
    names = []
    run = Kernel.run

    def record(kernel, *given, **options):
        names.append(kernel.function.fn.__name__)
        run(kernel, *given, **options)

    monkeypatch.setattr(Kernel, "run", record)
    return names


@pytest.mark.parametrize("page", [1, 5, 16, 64, 128])
def test_a_mixed_batch_takes_two_launches(calls, page):
    step = Step(Requests(*MIXED, size=32), page, max_num_splits=1)

    check(step.run(step.builder.build(step.batch()), padding=3), step.case)
    assert calls == ["_decode", "_prefill"]


FEATURES = {
    "window": {"window": 9},
    "window and chunk": {"window": 40, "chunk": 24},
    "chunk": {"chunk": 24},
    "soft cap": {"soft_cap": 3.0},
    "alibi": {"alibi": "linear"},
    "square root of alibi": {"alibi": "sqrt"},
    "soft cap and alibi": {"alibi": "linear", "soft_cap": 2.0},
    "sinks": {"has_sinks": True},
    "window and sinks": {"window": 9, "has_sinks": True},
    "not causal": {"causal": False},
    "three heads of 80": {"size": 80, "group": 3},
    "heads of 512": {"size": 512},
    "float16": {"dtype": torch.float16},
    "latents": {"size": 48, "latent": 32, "kv_heads": 1, "group": 5},
    "contiguous": {"paged": False, "kv_heads": 1, "group": 4},
    "contiguous with a window and chunks": {"paged": False, "window": 9, "chunk": 24},
    "an encoder": {"paged": False, "attn_type": "encoder", "causal": False, "alibi": "linear"},
    "an encoder with a window on both sides": {
        "paged": False,
        "attn_type": "encoder_only",
        "causal": False,
        "window": 9,
    },
    "cross attention over pages": {"attn_type": "encoder_decoder", "causal": False, "has_sinks": True},
    "contiguous cross attention": {"paged": False, "attn_type": "encoder_decoder", "causal": False},
    "custom mask": {"has_mask": True},
    "custom mask, window and sinks": {"has_mask": True, "window": 9, "has_sinks": True},
    "custom mask, not causal": {"has_mask": True, "causal": False},
    "contiguous custom mask": {"has_mask": True, "causal": False, "paged": False, "soft_cap": 3.0},
    "latents without a rotary part": {"size": 40, "latent": 40, "kv_heads": 1, "group": 8, "window": 9},
}


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, page):
    step = Step(Requests(*MIXED, **{"size": 32, **FEATURES[name]}), page, decode_query_len=3)
    metadata = step.builder.build(step.batch())

    with bounds_checked() if INTERPRETED else nullcontext():
        check(step.run(metadata), step.case)


@pytest.mark.parametrize(
    ("attn_type", "paged", "window"),
    [
        ("encoder_decoder", True, None),
        ("encoder_decoder", False, None),
        ("encoder", False, 6),
        ("encoder_only", False, 6),
    ],
)
def test_fewer_keys_than_queries(attn_type, paged, window):
    lens = [3, 30, 70, 0, 2, 9], [0, 3, 20, 0, 1, 65]
    case = Requests(*lens, size=32, attn_type=attn_type, causal=False, paged=paged, window=window)
    step = Step(case, decode_query_len=3)
    metadata = step.builder.build(step.batch())

    with bounds_checked() if INTERPRETED else nullcontext():
        found = step.run(metadata, padding=2)
    check(found, case)
    assert not found[0][:3].any()
    assert found[1][:3].isneginf().all()


SPANS = [[(0, 9), (12, 19)], [(40, 60)], [(1, 2)], [(30, 55), (57, 90)], [(120, 131)]]
"""Spans of the requests of `MIXED`: whole ones, ones that began before the step, and ones beyond it."""


@pytest.mark.parametrize("name", ["plain", "window", "chunk", "alibi", "contiguous", "three heads of 80", "short"])
def test_spans(calls, name):
    known = {"plain": {}, "short": {"window": 9}, **FEATURES}[name]
    case = Requests(*MIXED, spans=SPANS, **{"size": 32, **known})
    step = Step(case, decode_query_len=20 if name == "short" else 3)
    metadata = step.builder.build(step.batch())

    with bounds_checked() if INTERPRETED else nullcontext():
        check(step.run(metadata, padding=2), case)
    assert calls == ["_decode", "_prefill"]


def test_keys_of_a_span_are_split(calls):
    spans = [[(20, 1120)], [(3, 40)], [(0, 2)], [(30, 59)]]
    case = Requests([2, 1, 3, 40], [1100, 1050, 3, 60], size=32, window=1040, spans=spans)
    step = Step(case, page=64, decode_query_len=3)

    check(step.run(step.builder.build(step.batch()), padding=2), case)
    assert calls == ["_decode", "_merge", "_prefill"]


SPLIT = ["window", "sinks", "not causal", "three heads of 80", "latents", "contiguous", "cross attention over pages"]
SPLIT += ["custom mask"]


@pytest.mark.parametrize("name", SPLIT)
def test_splits_are_merged(calls, name):
    case = Requests([2, 1, 3, 40], [1100, 1050, 3, 60], **{"size": 32, **FEATURES[name]})
    step = Step(case, page=64, decode_query_len=3)
    metadata = step.builder.build(step.batch())
    splits = step.impl.wrapped.plan_of(metadata).num_splits

    check(step.run(metadata, padding=2), case)
    assert splits > 1 or name == "window"
    assert calls == (["_decode", "_merge", "_prefill"] if splits > 1 else ["_decode", "_prefill"])


@pytest.mark.parametrize("most", [1, 2])
def test_splits_observe_the_split_kv_limit(most):
    step = Step(Requests([1], [1100], size=32), max_num_splits=most)
    metadata = step.builder.build(step.batch())

    assert step.impl.wrapped.plan_of(metadata).num_splits == most
    check(step.run(metadata), step.case)


def test_batch_invariance_fixes_the_splits(calls):
    for lens in ([1, 1], [1100, 40]), ([1] * 7, [1100, 3, 1, 1, 1, 1, 1]), ([1], [1100]):
        step = Step(Requests(*lens, size=32, kv_heads=1), page=64, batch_invariant=True)
        metadata = step.builder.build(step.batch())
        assert step.impl.wrapped.plan_of(metadata).num_splits == 4
        check(step.run(metadata), step.case)

    assert set(calls) == {"_decode", "_merge"}


@pytest.mark.parametrize("name", ["window", "not causal", "three heads of 80"])
@pytest.mark.parametrize(("page", "spare"), [(64, 0), (96, 0), (128, 0), (128, 4)])
def test_descriptors_load_whole_tiles(monkeypatch, page, spare, name):
    used = []
    describe = launch._descriptors
    monkeypatch.setattr(launch, "_descriptors", lambda *given: used.append(describe(*given)) or used[-1])
    case = Requests([70, 100, 64], [300, 100, 256], **{"size": 32, **FEATURES[name]})
    step = Step(case, page)
    has_descriptors = step.backend.wrapped.prefill_tiles.descriptors
    metadata = step.builder.build(step.batch())
    shape = step.cache.shape[2:]
    step.cache = torch.nn.functional.pad(step.cache.flatten(2), (0, spare))[..., : shape.numel()].unflatten(-1, shape)

    with bounds_checked() if INTERPRETED else nullcontext():
        check(step.run(metadata), case)
    assert has_descriptors == (page != 96)
    assert [len(descriptors) for descriptors in used] == ([2 * (not spare)] if has_descriptors else [])


@pytest.mark.parametrize(
    ("name", "count"), [("whole heads", 2), ("not causal", 2), ("three heads of 80", 2), ("latents", 2), ("window", 0)]
)
@pytest.mark.parametrize("splits", [1, None])
def test_descriptors_load_whole_tiles_of_short_queries(monkeypatch, splits, name, count):
    used = []
    describe = launch._descriptors
    monkeypatch.setattr(launch, "_descriptors", lambda *given: used.append(describe(*given)) or used[-1])
    forms = {"whole heads": {}, "latents": {"kv_heads": 1, "group": 36, "size": 48, "latent": 40}}
    case = Requests([2, 1, 2], [600, 64, 128], **{"size": 32, **(forms.get(name) or FEATURES.get(name, {}))})
    step = Step(case, page=128, decode_query_len=2, max_num_splits=splits)
    backend = step.backend.wrapped
    backend.decode_tiles = evolve(backend.decode_tiles, keys=64, stages=2, descriptors=True)

    with bounds_checked() if INTERPRETED else nullcontext():
        check(step.run(step.builder.build(step.batch())), case)
    assert [len(descriptors) for descriptors in used] == ([count] if count else [])


@pytest.mark.parametrize(
    ("multiprocessors", "splits", "of_prefix"),
    [(1, None, ["_prefill"]), (132, 1, ["_decode"]), (132, None, ["_decode", "_merge"])],
)
@pytest.mark.parametrize("known", [{}, {"has_sinks": True}, {"soft_cap": 5.0}, {"is_fp8": True}], ids=str)
def test_a_shared_prefix(calls, monkeypatch, known, multiprocessors, splits, of_prefix):
    monkeypatch.setattr(TritonBackend, "_multiprocessors", multiprocessors)
    cached = {"kv_cache_dtype": "fp8_e5m2"} if known.get("is_fp8") else {}
    features = {name: value for name, value in known.items() if name != "is_fp8"}
    case = Requests([1, 20, 2, 1], [1100, 1060, 1042, 1500], size=32, group=4, **features)
    for part in ("keys", "values"):
        first, *rest = getattr(case, part)
        rows = [first, *(torch.cat([first[:1040], tensor[1040:]]) for tensor in rest)]
        case.put(part, [tensor.to(torch.float8_e5m2).to(tensor.dtype) for tensor in rows] if cached else rows)
    step = Step(case, cascade=True, decode_query_len=2, max_num_splits=splits, **cached)
    batch = step.batch()
    if cached:
        step.cache = step.cache.to(torch.float8_e5m2)
    batch.block_table[:, :65] = batch.block_table[:1, :65].clone()
    table = batch.block_table.cpu()

    check(step.run(step.builder.build(evolve(batch, block_table_cpu=table, common_prefix_len=1040))), case)
    after = calls[: len(calls) - len(of_prefix)]
    assert calls[len(after) :] == of_prefix
    assert after == ["_decode", "_prefill"]


@pytest.mark.parametrize("limit", ["window", "chunk"])
def test_a_span_is_split_beyond_a_window(monkeypatch, limit):
    programs = []
    run = Kernel.run

    def record(kernel, count, *given, **options):
        if kernel is launch._decode_kernel:
            programs.append(count)
        run(kernel, count, *given, **options)

    monkeypatch.setattr(Kernel, "run", record)
    for spans in ([[]], [[(100, 1499)]]):
        case = Requests([2], [1500], size=32, spans=spans, **{limit: 40})
        step = Step(case, decode_query_len=2)
        check(step.run(step.builder.build(step.batch())), case)

    tiles = step.backend.wrapped.decode_tiles
    per_head = [count // case.kv_heads for count in programs]
    assert per_head == [1, 1442 // (4 * tiles.keys)]  # 40 keys, two tokens, and 1400 of a span
    assert per_head[1] > 1


def test_a_batch_of_one_kind_takes_one_launch(calls):
    for lens, kernel in (([1, 1, 2], "_decode"), ([5, 0, 7], "_prefill")):
        calls.clear()
        step = Step(Requests(lens, [30, 9, 20], size=32), decode_query_len=2, max_num_splits=1)
        check(step.run(step.builder.build(step.batch())), step.case)

        assert calls == [kernel]


def test_more_rows_than_a_tile(calls):
    case = Requests([2, 1], [30, 9], kv_heads=1, group=71, size=16)
    step = Step(case, decode_query_len=2)
    assert step.backend.wrapped.short == 1

    check(step.run(step.builder.build(step.batch())), case)
    assert calls == ["_decode", "_prefill"]


@pytest.mark.parametrize("splits", [1, None])
def test_heads_of_latents_are_several_tiles(calls, splits):
    case = Requests([2, 1, 6], [600, 9, 40], kv_heads=1, group=36, size=48, latent=32)
    step = Step(case, decode_query_len=2, max_num_splits=splits)
    assert step.backend.wrapped.short == 2
    assert step.backend.wrapped.decode_tiles.rows == 64

    check(step.run(step.builder.build(step.batch()), padding=1), case)
    assert calls == (["_decode", "_prefill"] if splits else ["_decode", "_merge", "_prefill"])


@pytest.mark.parametrize("splits", [1, None])
@pytest.mark.parametrize("has_lens", [True, False])
def test_slots_beyond_the_kv_cache_are_not_read(calls, splits, has_lens):
    case = Requests([2, 1], [40, 9], kv_heads=1, group=20, size=48, latent=32)
    step = Step(case, topk=600, max_num_splits=splits)
    batch = step.batch()
    indices = torch.tensor([-1, 2**31 - 1, -(2**31), step.cache.shape[1] * step.page], dtype=torch.int32).repeat(3, 150)
    for token, request in enumerate([0, 0, 1]):
        at = torch.arange(case.seq_lens[request])
        table = batch.block_table[request].cpu()
        indices[token, 7 * at] = table[at // step.page] * step.page + (at % step.page).int()
    lens = torch.tensor([300] * 3, dtype=torch.int32, device=DEVICE) if has_lens else None
    key = torch.cat([rows[len(rows) - new :] for rows, new in zip(case.keys, case.query_lens, strict=True)])
    out = torch.full((4, 20 * 32), CANARY, dtype=case.dtype, device=DEVICE)
    lse = torch.full((4, 20), CANARY, device=DEVICE)
    cache = step.backend.bind_cache({"k": step.cache[0], "v": step.cache[0, ..., :32]})
    given = (torch.cat(case.queries), key, cache, step.builder.build(batch), indices.to(DEVICE), lens, out, lse)

    with bounds_checked() if INTERPRETED else nullcontext():
        step.impl.wrapped.run_sparse(*given)
    case.put("causal", False)  # all keys are selected
    check((out.view(4, 20, 32).cpu(), lse.cpu()), case)
    assert calls == (["_decode", "_merge"] if splits is None else ["_decode"])


def test_lengths_do_not_recompile(monkeypatch):
    compiled = {}
    for kernel in (launch._decode_kernel, launch._prefill_kernel):
        monkeypatch.setattr(kernel, "_launches", compiled.setdefault(kernel.function.fn.__name__, {}))
    steps = [([1] * count, [length] * count) for count in (1, 3) for length in (1, 16, 17, 300)]
    steps += [([count], [count + 3]) for count in (2, 16, 17, 130)]
    for lens in steps:
        step = Step(Requests(*lens, size=32), max_num_splits=1)
        check(step.run(step.builder.build(step.batch())), step.case)

    assert {name: len(forms) for name, forms in compiled.items()} == {"_decode": 1, "_prefill": 1}


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (("prefill", "decode"), ["_decode", "_decode", "_merge", "_prefill"]),
        (("decode",), ["_decode", "_decode", "_merge"]),
        (("prefill",), ["_prefill"]),
    ],
)
def test_a_warm_up_runs_each_kernel(calls, phases, expected):
    step = Step(Requests([1], [1], size=32), phases=phases)

    step.backend.warmup([GraphShape(1, 1, 1)])

    assert calls == expected


def test_a_warm_up_compiles_selections_with_and_without_lengths(calls):
    step = Step(Requests([1], [1], kv_heads=1, size=48, latent=32), topk=64)

    step.backend.warmup([GraphShape(1, 1, 1)])

    assert calls == ["_decode", "_decode"]


def test_e4m3_by_bits(monkeypatch):
    steps = []
    for reads_bits in (False, True):
        monkeypatch.setattr(TritonBackend, "reads_bits", reads_bits)
        step = Step(Requests(*MIXED, size=32), kv_cache_dtype="fp8_e4m3")
        batch = step.batch()
        step.cache = step.cache.to(torch.float8_e4m3fn)
        steps.append(step.run(step.builder.build(batch)))

    assert torch.equal(steps[0][0], steps[1][0])


@pytest.mark.parametrize("name", ["decode", "prefill"])
@pytest.mark.parametrize("factor", [2.0**-60, 2.0**60])
def test_queries_beside_an_fp8_kv_cache_have_the_range_of_bfloat16(monkeypatch, factor, name):
    """They are multiplied as float16, whose range is from 2^-24 to 2^16."""
    found = []
    for size in (1.0, factor):
        case = Requests([1, 1] if name == "decode" else [40, 21], [65, 70], size=32, dtype=torch.bfloat16)
        case.put("queries", [rows * size for rows in case.queries])
        monkeypatch.setattr(Requests, "scale", 32**-0.5 / size)
        step = Step(case, kv_cache_dtype="fp8_e5m2")
        batch = step.batch()
        step.cache = step.cache.to(torch.float8_e5m2)
        found.append(step.run(step.builder.build(batch)))

    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1])


LARGEST = 2.0**127 * 255 / 128


@pytest.mark.parametrize(
    ("name", "lens"),
    [("decode", ([2, 1], [65, 70])), ("prefill", ([40, 21], [65, 70])), ("cascade", ([1, 1], [1045, 1050]))],
)
@pytest.mark.parametrize("value", [2.0**40, LARGEST, torch.inf, torch.nan])
def test_queries_beside_an_fp8_kv_cache_do_not_depend_on_others(name, lens, value):
    """A tile has rows of several tokens and heads, and of all requests where these share a prefix."""
    found = []
    for is_changed in (False, True):
        case = Requests(*lens, size=32, group=4, dtype=torch.bfloat16)
        if is_changed:
            case.queries[0][0, 1] = value
            case.queries[0][-1, 3] = 0
        step = Step(case, kv_cache_dtype="fp8_e5m2", decode_query_len=2, cascade=name == "cascade")
        batch = step.batch()
        step.cache = step.cache.to(torch.float8_e5m2)
        if name == "cascade":
            batch.block_table[:, :65] = batch.block_table[:1, :65].clone()
            batch = evolve(batch, block_table_cpu=batch.block_table.cpu(), common_prefix_len=1040)
        found.append(step.run(step.builder.build(batch)))

    last = case.query_lens[0] - 1
    is_other = torch.ones(found[0][1].shape, dtype=torch.bool)
    is_other[0, 1] = is_other[last, 3] = False
    assert all(torch.equal(one[is_other], other[is_other]) for one, other in zip(*found, strict=True))
    assert found[1][0][is_other].isfinite().all()
    assert found[1][0][last, 3].isfinite().all()


@pytest.mark.parametrize("name", ["decode", "prefill", "latents"])
@pytest.mark.parametrize("factor", [0.0, 2.0**-130, LARGEST])
def test_extreme_queries_beside_keys_of_zero(name, factor):
    case = Requests(
        [1] if name == "decode" else [40], [65], dtype=torch.bfloat16,
        **{"size": 32, **(FEATURES["latents"] if name == "latents" else {})},
    )  # fmt: skip
    case.put("queries", [torch.full_like(rows, factor) for rows in case.queries])
    case.put("keys", [torch.zeros_like(rows) for rows in case.keys])
    if name == "latents":
        case.put("values", [torch.zeros_like(rows) for rows in case.values])
    else:
        case.put("values", [rows.to(torch.float8_e4m3fn).to(rows.dtype) for rows in case.values])
    step = Step(case, kv_cache_dtype="fp8_e4m3")
    batch = step.batch()
    step.cache = step.cache.to(torch.float8_e4m3fn)

    check(step.run(step.builder.build(batch)), case)


@pytest.mark.parametrize("cache", PER_TOKEN_HEAD)
@pytest.mark.parametrize(("dtype", "factor"), [("float16", 2.0**-10), ("bfloat16", 2.0**20), ("bfloat16", 2.0**-60)])
@pytest.mark.parametrize("lens", [((1, 2), (300, 61)), ((20, 40), (50, 0))])
def test_values_of_all_magnitudes_beside_scales_per_token_head(cache, dtype, factor, lens):
    """Neither weights times scales nor values leave the range of their dtype."""
    sizes = {"head_size": 32, "head_size_v": 48, "num_q_heads": 4, "num_kv_heads": 2, "block_size": 16}
    case = Case(query_lens=lens[0], context_lens=lens[1], dtype=dtype, kv_cache_dtype=cache, **sizes)
    scene = materialize(case)
    scene = evolve(scene, values=tuple(rows * factor for rows in scene.values))
    backend = attnplug.select(case.requirements(), Device.parse(DEVICE), backend="triton").load()
    runner = SceneRunner(backend, scene)

    runner.compare(runner.run(scene).call, scene, f"values times {factor}")


@pytest.mark.parametrize("cache", PER_TOKEN_HEAD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_are_written_with_scales_per_token_head(cache, dtype):
    generator = torch.Generator().manual_seed(3)
    narrow = torch_dtype(cache)
    pages = CacheTensor((3, 4, 2, 24), narrow, 0)
    specs = {"k": pages, "v": evolve(pages, shape=(3, 4, 2, 40), stride_order=(0, 1, 2, 3))}
    specs |= dict.fromkeys(("k_scale", "v_scale"), CacheTensor((3, 2, 4), torch.float32, 0))
    tensors = {role: spec.allocate(DEVICE) for role, spec in specs.items()}
    rows = [torch.randn(7, 2, size, generator=generator).to(dtype) for size in (24, 40)]
    for each in rows:
        each[0, 0], each[1, 1, 5], each[2] = 0, torch.nan, each[2] * 2.0**-12
    slots = torch.tensor([11, 0, 5, -1, 7, 6, 10])

    given = [each.transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE) for each in rows]  # of any strides
    launch.write_rows(*given, KVCache(tensors, 3, CacheSpec("independent", "NHD", specs)), slots.to(DEVICE))

    kept = slots >= 0
    for role, each in zip("kv", rows, strict=True):
        codes, scales = by_row(each[kept], narrow)
        held, own = tensors[role].cpu().flatten(0, 1), tensors[f"{role}_scale"].cpu().transpose(1, 2).flatten(0, 1)
        is_nan = each[kept].isnan().any(-1)
        assert torch.equal(own[slots[kept]][~is_nan], scales[~is_nan])
        assert torch.equal(held.double()[slots[kept]][~is_nan], codes[~is_nan])
        assert torch.equal(own[slots[kept]].isinf(), is_nan)  # 0 times infinity is NaN
        assert not own[[1, 2, 3, 4, 8, 9]].any()
