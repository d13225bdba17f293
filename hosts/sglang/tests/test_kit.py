"""SGLang's own tests of attention backends, from its wheel: they make a backend before the model has a layer."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any
from unittest import TestCase

import pytest
import torch

from attnplug.errors import CacheError, NotNegotiatedError
from attnplug_sglang.registration import register
from hosts.sglang.tests.rig import ForwardMode, World, worst

KIT = "sglang.test.kits.attention_unittest"
kit: Any = pytest.importorskip(f"{KIT}.attention_methods.dense_attention")
latents: Any = pytest.importorskip(f"{KIT}.attention_methods.mla_attention")
verify: Any = pytest.importorskip(f"{KIT}.runner_modes.speculative_target_verify_runner")
graphs: Any = pytest.importorskip(f"{KIT}.runner_modes.cuda_graph_decode_runner")
extending: Any = pytest.importorskip(f"{KIT}.runner_modes.speculative_draft_extend_runner")
split: Any = pytest.importorskip(f"{KIT}.runner_modes.split_op_runner")

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "attnplug"
CASES = [
    *kit.make_dense_cases(NAME),
    *kit.make_swa_no_prefix_input_config_cases(NAME),
    *kit.make_swa_prefix_input_config_cases(NAME),
]


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The name, among those whose windows the kit knows: of attnplug, as of most, a token has its window besides."""
    monkeypatch.setattr(kit, "_SWA_DECODE_EXTEND_WINDOW", kit._SWA_DECODE_EXTEND_WINDOW | {NAME})
    register()
    with torch.no_grad():  # on a CPU the kit writes K/V of weights by indexing
        yield


@pytest.mark.parametrize("layout", ["contiguous", "shuffled_pages", "interleaved_pages"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sglangs_own_cases(case: Any, layout: str) -> None:
    kit.run_dense_attention_case(TestCase(), case, device="cpu", loc_layout=layout)


@pytest.fixture
def modelless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the kit's runner of latents a model without modules: it has none."""
    monkeypatch.setattr(latents.MockMLAModelRunner, "model", torch.nn.Module(), raising=False)


@pytest.mark.parametrize("case", latents.make_mla_cases(NAME), ids=lambda case: case.name)
def test_sglangs_own_cases_of_latents(case: Any, modelless: None) -> None:
    latents.run_mla_attention_case(TestCase(), case, device="cpu")


@pytest.mark.parametrize("page_size", [1, 16])
def test_sglangs_own_drafts_over_latents(page_size: int, modelless: None) -> None:
    case = latents.MLAAttentionCase("drafts", NAME, ForwardMode.TARGET_VERIFY, 4, page_size, (7, 18), (4, 4))
    verify.run_mla_eagle_verify_case(TestCase(), case, topk=1, device="cpu")


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(
    "case", [each for each in latents.make_mla_cases(NAME) if each.forward_mode.is_decode()], ids=lambda case: case.name
)
def test_sglangs_own_graphs_of_latents(case: Any, padding: int, modelless: None) -> None:
    size = case.batch_size + padding
    graphs.run_mla_cuda_graph_decode_case(TestCase(), case, device="cpu", cuda_graph_capture_batch_size=size)


# The kit's shuffle of two tokens may change nothing.
@pytest.mark.parametrize("case", [each for each in CASES if max(each.input_lens) != 2], ids=lambda case: case.name)
def test_tokens_out_of_order_within_a_page_are_refused(case: Any) -> None:
    """SGLang's allocator of pages makes no such slots: with pages of 1 token, every order is served."""
    scattered = case.page_size > 1 and max(case.input_lens) > 2
    with pytest.raises(CacheError, match="where attention reads it") if scattered else nullcontext():
        kit.run_dense_attention_case(TestCase(), case, device="cpu", loc_layout="non_monotonic_extend")


def drafted(mode: ForwardMode, page_size: int, drafts: tuple[int, ...]) -> Any:
    """Return a case of drafts behind two prefixes."""
    return kit.DenseAttentionCase(
        name="drafts",
        backend=NAME,
        forward_mode=mode,
        num_heads=4,
        num_kv_heads=2,
        page_size=page_size,
        prefix_lens=(7, 18),
        extend_lens=drafts,
    )


@pytest.mark.parametrize(("topk", "drafts"), [(1, (4, 4)), (2, (3, 3))])
@pytest.mark.parametrize("page_size", [1, 16])
def test_sglangs_own_drafts(topk: int, drafts: tuple[int, ...], page_size: int) -> None:
    case = drafted(ForwardMode.TARGET_VERIFY, page_size, drafts)
    verify.run_dense_spec_verify_case(TestCase(), case, topk=topk, device="cpu")


@pytest.mark.parametrize(("topk", "drafts"), [(1, (4, 4)), (2, (3, 3))])
def test_sglangs_own_graphs_of_drafts(topk: int, drafts: tuple[int, ...]) -> None:
    """Without padding: for the kit a request of length 0 has drafts that attend to each other, here it is padding."""
    case = drafted(ForwardMode.TARGET_VERIFY, 16, drafts)
    run = verify.run_dense_spec_verify_cuda_graph_case
    run(TestCase(), case, topk=topk, device="cpu", cuda_graph_capture_batch_size=len(drafts))


# These capture nothing: what a graph would record is called again at the replay. So they run on a CPU.
@pytest.mark.parametrize(
    "case", [each for each in CASES if each.forward_mode.is_decode()], ids=lambda case: f"{case.name}-{case.page_size}"
)
@pytest.mark.parametrize("padding", [0, 3])
def test_sglangs_own_graphs_of_decodes(case: Any, padding: int) -> None:
    size = case.batch_size + padding
    graphs.run_dense_cuda_graph_decode_case(TestCase(), case, device="cpu", cuda_graph_capture_batch_size=size)


@pytest.mark.parametrize(
    ("run", "case"),
    [
        pytest.param(run, each, id=each.name)
        for run, cases in (
            (split.run_dense_split_op_extend_case, CASES),
            (split.run_mla_split_op_extend_case, latents.make_mla_cases(NAME)),
        )
        for each in cases
        if each.forward_mode.is_extend_without_speculative()
    ],
)
@pytest.mark.parametrize("breakable", [False, True])
def test_sglangs_own_prefills_split_at_attention(run: Any, case: Any, breakable: bool, modelless: None) -> None:
    operator = "sglang::unified_attention_with_output"  # of earlier versions
    is_known = operator in torch._C._dispatch_get_all_op_names()
    if is_known and not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU"):
        pytest.skip("0.5.20 registers the operator that splits its graphs for CUDA alone")
    tokens = case.num_input_tokens + 5
    run(TestCase(), case, breakable=breakable, static_num_tokens=tokens, device="cpu")


def test_sglangs_own_graphs_of_draft_models_are_refused() -> None:
    """
    A draft model's own decodes have a list of slots per branch, and its extends have queries of different lengths.

    The kit's runners of such decodes, `run_dense_eagle_draft_cuda_graph_runner_case` and others, capture with CUDA.
    """
    case = drafted(ForwardMode.DRAFT_EXTEND_V2, 1, (4, 4))
    with pytest.raises(NotNegotiatedError, match="captures a step of the mode DRAFT_EXTEND_V2"):
        extending.run_dense_draft_extend_v2_cuda_graph_case(TestCase(), case, device="cpu")


def late(**options: Any) -> tuple[World, Any]:
    """Return layers, and a backend that was made before the model had them."""
    world = World(**options)
    world.runner.model = torch.nn.Module()
    return world, world.backend()


@pytest.mark.parametrize("options", [{}, {"page": 16, "swa": True}, {"sinks": True}])
def test_layers_are_decided_at_their_first_call(options: dict[str, Any]) -> None:
    world, backend = late(**options)
    assert backend.explain() == ""
    first, second = world.new(), world.new()
    assert world.step(backend, [first, second], [9, 20], ForwardMode.EXTEND) < 1e-5
    assert world.step(backend, [first, second], [1, 1], ForwardMode.DECODE) < 1e-5
    assert world.step(backend, [second], [30], ForwardMode.EXTEND) < 1e-5
    assert "layers.1" in backend.explain()


def test_late_layers_are_checked() -> None:
    world, backend = late()
    world.layers[1].attn.use_irope = True
    with pytest.raises(NotNegotiatedError, match="irope"):
        world.step(backend, [world.new()], [3], ForwardMode.EXTEND)


def test_late_layers_are_in_graphs_after_a_step() -> None:
    world, backend = late()
    request = world.new()
    backend.init_cuda_graph_state(4, 4)
    dummy = world.batch([], [], ForwardMode.DECODE, pad=1)
    with pytest.raises(NotNegotiatedError, match="before any layer of the model was there"):
        backend.init_forward_metadata_out_graph(dummy)
    assert world.step(backend, [request], [9], ForwardMode.EXTEND) < 1e-5
    backend.init_forward_metadata_out_graph(dummy, in_capture=True)
    backend.init_forward_metadata_in_graph(dummy)
    step, data = world.batch([request], [1], ForwardMode.DECODE), world.qkv(1)
    backend.init_forward_metadata_out_graph(step)
    assert worst(world.run(backend, step, data), world.expected([request], [1], data)) < 1e-5
