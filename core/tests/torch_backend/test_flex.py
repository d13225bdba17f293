"""The variant flex without its compiler: block masks by brute force, and the eager kernel compared with the oracle."""

from __future__ import annotations

import random
import warnings
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import Limits, LoadedBackend
from attnplug.errors import LimitsError
from attnplug.request.device import Device
from attnplug.torch_backend.backend import FlexBackend, TorchBackend
from attnplug.torch_backend.masks import Visibility
from attnplug_kit.oracle import FEATURES, Case, cases, check, materialize, random_case

pytest.importorskip("torch", minversion="2.11", reason="the variant flex needs torch 2.11, as its manifest says")

from torch.nn.attention.flex_attention import AuxOutput

from attnplug.torch_backend import flex

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK = 8
CACHE = ("latent", "kv_cache_dtype", "per_head_scales")
visibilities = st.builds(Visibility, left=st.sampled_from([-1, 0, 5, 20]), right=st.sampled_from([-1, 0, 9]))


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "compiled", lambda *_: flex._flex)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"[\s\S]*flex_attention called without torch.compile")
        yield


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "BLOCK", BLOCK)


def load(case: Case, **engine: object) -> LoadedBackend:
    """The variant on the CPU, where it is never selected."""
    selection = attnplug.select(case.requirements(**engine), Device.cpu(), backend="torch/sdpa")
    return LoadedBackend(TorchBackend(evolve(selection.agreement, variant="flex"), Device.cpu()))


@pytest.mark.usefixtures("_small_blocks")
@given(
    visibilities,
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=1, max_size=3),
    st.sampled_from([1, 3]),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_blocks_are_skipped_masked_or_full(visibility: Visibility, lens: list[tuple[int, int]], ratio: int) -> None:
    num_rows = [rows for rows, _ in lens]
    num_keys = [rows + context for rows, context in lens]

    mask = flex.make_mask(visibility, torch.tensor([num_rows, num_keys]), max(num_rows), max(num_keys), ratio)

    row, key = torch.arange(max(num_rows) * ratio), torch.arange(max(num_keys))
    for member, (rows, keys) in enumerate(zip(num_rows, num_keys, strict=True)):
        position = (row // ratio).clamp(max=rows - 1) + keys - rows
        visible = visibility.of(key - position.unsqueeze(1)) & (key < keys)
        shown = mask.blocks.mask_mod(torch.tensor(member), torch.tensor(0), row.unsqueeze(1), key)
        assert torch.equal(shown, visible)
        kinds = {
            "partial": (mask.blocks.kv_num_blocks, mask.blocks.kv_indices),
            "full": (mask.blocks.full_kv_num_blocks, mask.blocks.full_kv_indices),
        }
        for block in range(-(-len(row) // BLOCK)):
            listed = {
                kind: set(indices[member, 0, block, : counts[member, 0, block]].tolist())
                for kind, (counts, indices) in kinds.items()
            }
            for column in range(-(-len(key) // BLOCK)):
                part = visible[block * BLOCK : (block + 1) * BLOCK, column * BLOCK : (column + 1) * BLOCK]
                whole = bool(part.all()) and (column + 1) * BLOCK <= keys
                assert (column in listed["full"]) == whole
                assert (column in listed["partial"]) == (bool(part.any()) and not whole)


@pytest.mark.slow
@pytest.mark.usefixtures("_eager")
@given(
    cases(features=set(FEATURES) - {"custom_mask", "mm_prefix", "attn_type", *CACHE}, head_size=16)
    | cases(features=set(FEATURES) - {"custom_mask", "mm_prefix", *CACHE}, head_size=16),
    st.sampled_from(["NHD", "HND"]),
    st.booleans(),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_batches(case: Case, layout: str, paged: bool) -> None:
    paged = (paged or case.kv_sharing) and case.may_be_paged
    pages = {"block_size": case.block_size, "kv_layout": layout} if paged else {}
    check(load(case, paged=paged, return_lse=True, **pages), materialize(case))


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("requested", [{}, {"alibi": "linear"}, {"alibi": "sqrt", "attention_chunk": 90}], ids=str)
def test_prompts_longer_than_a_block(requested: dict[str, object]) -> None:
    requested = {"sliding_window": 60, "logits_soft_cap": 5.0, "sinks": True, **requested}
    case = Case(query_lens=(1, 150, 200), context_lens=(300, 40, 0), **requested)

    check(load(case, return_lse=True), materialize(case))


def test_a_cap_has_one_function_per_device() -> None:
    assert flex.soft_cap_mod(30.0, torch.device("cpu")) is flex.soft_cap_mod(30.0, torch.device("cpu"))
    assert flex.soft_cap_mod(30.0, torch.device("cpu")) is not flex.soft_cap_mod(50.0, torch.device("cpu"))


@given(
    st.builds(
        flex.Kind,
        heads=st.integers(1, 16),
        size=st.sampled_from([16, 32, 64, 128]),
        size_v=st.sampled_from([16, 32, 64, 128]),
        dtype=st.just(torch.float32),
        device=st.just(torch.device("cpu")),
        alone=st.booleans(),
        short=st.integers(0, 2),
        scale=st.just(1.0),
    )
)
@settings(max_examples=30)
def test_the_first_sizes_are_of_their_kind_and_unequal(kind: flex.Kind) -> None:
    query, key, value, mask = flex.unequal_sizes(kind)

    rows, keys, numbers = query.shape[2], key.shape[1], mask.blocks.kv_indices.shape
    assert (query.shape[0] == 1) == kind.alone
    assert kind.short == (0 if rows == 1 else 1 if rows < flex.BLOCK else 2)
    assert key.shape[:3] == value.shape[:3]
    assert (numbers[2], numbers[3]) == (max(2, -(-rows // flex.BLOCK)), max(2, -(-keys // flex.BLOCK)))
    free = [n for n in (query.shape[0], rows, keys, numbers[2], numbers[3]) if n > 2]
    assert len({*free, kind.heads, kind.size, kind.size_v}) == len(free) + len({kind.heads, kind.size, kind.size_v})


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "alibi"), [("NHD", None), ("HND", "sqrt")])
def test_each_kind_of_group_is_one_graph(layout: str, alibi: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler traces, and generates no code: graphs are the same for every device."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    flex.compiled.cache_clear()
    generator, kinds = random.Random(3), set()
    kind_of = flex._kind
    monkeypatch.setattr(flex, "_kind", lambda *args: kinds.add(kind_of(*args)) or kind_of(*args))
    fixed = {"dtype": "float32", "head_size": 64, "num_kv_heads": 2, "logits_soft_cap": None, "alibi": alibi}
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    for _ in range(40):
        case = random_case(generator, features=("sliding_window", "sinks", "causal"), **fixed)
        case = evolve(case, num_q_heads=generator.choice([2, 4, 14]))
        check(load(case, block_size=case.block_size, kv_layout=layout), materialize(case))

    flex.compiled.cache_clear()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] - before == len(kinds)
    assert len(kinds) >= 5


@pytest.mark.parametrize(
    ("device", "size", "size_v", "options"),
    [
        ("cuda", 64, 256, {"num_stages": 1}),
        ("cuda", 128, 192, {"num_stages": 1}),
        ("cuda", 256, 256, None),
        ("cuda", 64, 128, None),
        ("cpu", 64, 256, None),
    ],
)
def test_values_far_wider_than_keys_are_loaded_in_one_stage(monkeypatch, device, size, size_v, options) -> None:
    """More stages would not fit into the shared memory of a GPU: the compiler considers the size of keys only."""
    given = []

    def recorded(query, key, value, **options):
        given.append(options["kernel_options"])
        return value, AuxOutput(lse=None)

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(flex, "flex_attention", recorded)
    kind = flex.Kind(2, size, size_v, torch.float16, torch.device("cpu"), alone=True, short=2, scale=1.0)
    is_wide = evolve(kind, device=torch.device(device)).is_wide
    monkeypatch.setattr(flex.Kind, "is_wide", is_wide)

    flex.compiled.__wrapped__(kind, soft_capped=False)

    assert given == [options]


def test_a_split_kv_limit_is_refused() -> None:
    selection = attnplug.select(
        Case(query_lens=(1,), context_lens=(0,)).requirements(), Device.cpu(), backend="torch/sdpa"
    )
    limits = Limits(max_num_reqs=1, max_num_tokens=8, max_seq_len=64, max_num_splits=2)

    with pytest.raises(LimitsError, match=r"(?s)max_num_splits=2 was given.*does not support a split-KV limit"):
        LoadedBackend(FlexBackend(selection.agreement, selection.device)).make_state(limits)
    LoadedBackend(TorchBackend(selection.agreement, selection.device)).make_state(limits)
