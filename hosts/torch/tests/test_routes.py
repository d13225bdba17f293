"""What is reported of calls, and forecast."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.torch_version import TorchVersion

import attnplug
import attnplug_torch
from attnplug.dense import DecisionCache
from attnplug_torch import decisions, dense, layers, measured, routes
from attnplug_torch.visibility import Visibility
from hosts.torch.tests.reference import counted, tensors
from tests.evidence_tables import ratios_on_the_device


def test_a_route_is_a_sentence() -> None:
    assert str(attnplug_torch.Route("varlen_attn", "cpu", "torch/sdpa")) == "varlen_attn on cpu: torch/sdpa"
    counted = attnplug_torch.Route("varlen_attn", "cuda", None, "dropout_p=0.1", calls=3)
    assert str(counted) == "3 × varlen_attn on cuda: torch's own operator (dropout_p=0.1)"  # noqa: RUF001


def test_routes_are_counted_most_first_and_from_zero_again(active) -> None:
    attnplug_torch.reset()
    for _ in range(2):
        routes.count("a", "cpu", "x/y")
    routes.count("b", "cpu", None, "why")

    assert [(one.operator, one.calls) for one in attnplug_torch.report()] == [("a", 2), ("b", 1)]
    attnplug_torch.reset()
    assert attnplug_torch.report() == ()


def test_reasons_without_end_take_no_memory_without_end(active) -> None:
    for index in range(2 * routes._MOST):
        routes.count("a", "cpu", None, f"reason {index}")

    report = attnplug_torch.report()
    assert len(report) <= routes._MOST + 1
    assert sum(one.calls for one in report) == 2 * routes._MOST


ARGUMENTS = {
    "plain": {},
    "causal": {"is_causal": True},
    "dropout": {"dropout_p": 0.3},
    "boolean mask": {"attn_mask": torch.ones(9, 9, dtype=torch.bool)},
    "double mask": {"attn_mask": torch.zeros(9, 9, dtype=torch.float64)},
    "trained mask": {"attn_mask": torch.zeros(9, 9).requires_grad_()},
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("axes", [3, 4])
def test_a_forecast_is_what_happens(arguments, axes, active) -> None:
    inputs = tensors((1, 2, 9, 64)[-axes:], (1, 2, 9, 64)[-axes:])
    try:
        sdpa(*inputs, **arguments)
    except RuntimeError:  # of torch: a mask of another dtype
        assert counted() == {}
        return

    forecast = attnplug_torch.explain(*inputs, **arguments)

    assert counted() == {(forecast.backend, forecast.reason): 1}
    assert forecast.calls == 0


def test_a_forecast_adds_the_batch_axis_that_torch_adds(active, monkeypatch) -> None:
    """In torch 2.14 calls without one reach flash attention."""
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    query = torch.randn(2, 9, 64)

    assert attnplug_torch.explain(query, query, query).backend == "torch/sdpa"


def test_values_of_another_size_are_left_to_torch(active) -> None:
    query = torch.randn(1, 2, 9, 64)

    sdpa(query, query, query[..., :32])
    sdpa(query.transpose(2, 3), query.transpose(2, 3), query.transpose(2, 3))

    reasons = [reason for _, reason in counted()]
    assert any("another head size" in one for one in reasons)
    assert any("not contiguous" in one for one in reasons)


def test_names_are_public() -> None:
    assert set(dir(attnplug_torch)) == set(attnplug_torch.__all__)
    for name in attnplug_torch.__all__:
        assert getattr(attnplug_torch, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'activate_all'"):
        _ = attnplug_torch.activate_all


def decided(*, has_flash, keys=100, device="cpu"):
    """Decide a call; on the CPU the built-in backend is all that serves it."""

    def make():
        return attnplug.Requirements(head_size=24, num_q_heads=2, num_kv_heads=2, dtype="float32", return_lse=True)

    kind, rows = ("of a test", has_flash), measured.FASTER_NATIVELY
    return decisions.decide(kind, torch.device(device), make, has_flash=lambda: has_flash, keys=keys, rows=rows)


def test_torchs_fused_operator_is_preferred_to_the_built_in_backend_alone() -> None:
    with pytest.raises(decisions.RefusedError, match="only torch/sdpa serves it"):
        decided(has_flash=True)

    assert decided(has_flash=False).id == "torch/sdpa"
    with attnplug.using(backend="torch/sdpa"):
        assert decided(has_flash=True).id == "torch/sdpa"


@pytest.fixture
def on_hopper(monkeypatch):
    """Return a function that has a backend chosen for every request, on a GPU that need not be here."""

    def choose(backend, capability="9.0"):
        device = attnplug.Device("cuda", compute_capability=capability)
        monkeypatch.setattr(decisions, "device_of", lambda _: device)
        monkeypatch.setattr(decisions, "shared_backend", lambda *_: SimpleNamespace(id=backend))
        monkeypatch.setattr(decisions, "_decisions", DecisionCache(refusals=(decisions.RefusedError,)))

    return choose


def test_short_sequences_are_left_to_torch_where_it_was_measured_faster(on_hopper) -> None:
    on_hopper("flash_attn/fa4")
    with pytest.raises(decisions.RefusedError, match=r"took 0.86 of its time .*torch-h200.md: sdpa causal 1x4x8x64"):
        decided(has_flash=True, keys=8, device="cuda")

    assert decided(has_flash=True, keys=9, device="cuda").id == "flash_attn/fa4"
    assert decided(has_flash=False, keys=8, device="cuda").id == "flash_attn/fa4"
    with attnplug.using(backend="flash_attn/fa4"):  # named: it runs
        assert decided(has_flash=True, keys=8, device="cuda").id == "flash_attn/fa4"


@pytest.mark.parametrize(("backend", "capability"), [("flash_attn/fa4", "10.0"), ("flash_attn/fa2", "9.0")])
def test_what_was_not_measured_runs_on_its_backend(backend, capability, on_hopper) -> None:
    on_hopper(backend, capability)

    assert decided(has_flash=True, keys=8, device="cuda").id == backend


def test_a_refused_kind_is_not_decided_again(active, monkeypatch) -> None:
    """It costs less than torch's operator: neither checks nor a look-up of the decision."""
    inputs = tensors((1, 2, 9, 64), (1, 2, 5, 64))  # more causal queries than keys
    for _ in range(2):
        sdpa(*inputs, is_causal=True)
    monkeypatch.setattr(dense, "backend_of", lambda *_, **__: pytest.fail("it was decided again"))
    sdpa(*inputs, is_causal=True)
    with pytest.raises(pytest.fail.Exception):  # another kind is
        sdpa(*tensors((1, 2, 7, 64), (1, 2, 7, 64)), is_causal=True)

    ((_, reason),) = counted()
    assert "more queries than keys" in reason
    assert counted() == {(None, reason): 3}


@pytest.mark.parametrize(
    ("rows", "operator"), [(measured.FASTER_NATIVELY, "sdpa"), (measured.FASTER_PACKED, "varlen")], ids=lambda one: one
)
def test_every_slower_row_of_the_evidence_page_is_left_to_torch(rows, operator) -> None:
    """The built-in backend is left to torch whatever was measured."""
    page = Path(__file__).parents[3] / rows.source
    for backend in ("flash_attn/fa3_vllm", "flash_attn/fa4"):
        mine = {one.row: one for one in rows.rows if one.backend == backend}
        found = {row: ratio for row, ratio in ratios_on_the_device(page, backend).items() if row.startswith(operator)}
        assert mine.keys() <= found.keys()
        for row, ratio in found.items():
            keys = int(row.split()[2].split("x")[2])
            assert (ratio < 0.97) == any(keys <= one.keys for one in mine.values()), row
        assert all(one.ratio == found[row] for row, one in mine.items())


@pytest.fixture
def asked(monkeypatch):
    """Return what is said of torch's own operator in each decision; none is made."""
    answers = []
    for module in (dense, layers):
        monkeypatch.setattr(module, "decide", lambda *_, has_flash, keys, rows: answers.append(has_flash()))
    monkeypatch.setattr(decisions.torch.cuda, "is_current_stream_capturing", lambda: False)
    return answers


def described(dtype, shape, *, is_cuda):
    """Return what of a tensor a decision reads, on a device that need not be here."""
    return SimpleNamespace(dtype=dtype, shape=shape, ndim=len(shape), is_cuda=is_cuda, device=None)


@pytest.mark.parametrize("is_cuda", [False, True])
def test_only_cuda_has_a_fused_operator_beside_the_built_in_backend(is_cuda, asked) -> None:
    one = described(torch.bfloat16, (1, 2, 5, 64), is_cuda=is_cuda)

    dense.backend_of(one, one, one, is_causal=True, attn_mask=None)

    assert asked == [is_cuda]


@pytest.mark.parametrize(
    ("dtype", "size", "size_v", "paged", "capability", "has_flash"),
    [
        (torch.bfloat16, 64, 64, False, (9, 0), True),
        (torch.float16, 256, 256, False, (8, 0), True),
        (torch.float32, 64, 64, False, (9, 0), False),
        (torch.bfloat16, 320, 320, False, (9, 0), False),
        (torch.bfloat16, 60, 60, False, (9, 0), False),
        (torch.bfloat16, 64, 128, False, (9, 0), False),
        (torch.bfloat16, 64, 64, True, (9, 0), False),
        (torch.float16, 64, 64, False, (7, 5), False),
    ],
)
def test_packed_calls_have_one_for_what_flash_attention_2_takes(
    dtype, size, size_v, paged, capability, has_flash, asked, monkeypatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    one, value = (described(dtype, (5, 16, 2, n) if paged else (5, 2, n), is_cuda=True) for n in (size, size_v))
    one.stride = value.stride = lambda: (1,)
    query = described(dtype, (5, 2, size), is_cuda=True)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    call = layers.PackedCall(
        query=query,
        key=one,
        value=value,
        query_start_loc=starts,
        key_start_loc=None,
        max_query_len=5,
        max_seq_len=5,
        visibility=Visibility(causal=True, window=None),
        block_table=starts if paged else None,
    )

    layers.backend_of(call)

    assert asked == [has_flash]
