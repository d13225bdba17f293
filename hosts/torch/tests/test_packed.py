"""`varlen_attn` through attnplug beside the float64 oracle of the kit."""

from __future__ import annotations

from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import attnplug
import attnplug_torch
from attnplug.errors import NoBackendError, NotNegotiatedError, TensorError
from attnplug.torch_backend.impl import TorchImpl
from attnplug_torch import layers
from hosts.torch.tests.reference import TOLERANCES, by_sequence, counted, served, varlen_attn

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")

STARTS, KEY_STARTS = torch.tensor([0, 5, 6, 12], dtype=torch.int32), torch.tensor([0, 9, 13, 20], dtype=torch.int32)
LONGEST = (6, 9)


def rows(kv_heads=4, dtype=torch.float32):
    return [torch.randn(tokens, heads, 64).to(dtype) for tokens, heads in ((12, 4), (20, kv_heads), (20, kv_heads))]


def call(inputs, **arguments):
    return varlen_attn(*inputs, STARTS, KEY_STARTS, *LONGEST, **arguments)


CALLS = {
    "not causal": ({}, {"causal": False}),
    "causal": ({"window_size": (-1, 0)}, {"causal": True}),
    "window": ({"window_size": (3, 0)}, {"causal": True, "window": (3, 0)}),
    "scale": ({"scale": 0.3}, {"causal": False, "scale": 0.3}),
    "one split": ({"num_splits": 1, "window_size": (-1, 0)}, {"causal": True}),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize(("arguments", "features"), CALLS.values(), ids=CALLS)
def test_sequences_have_the_result_of_the_oracle(arguments, features, dtype, active) -> None:
    inputs = rows(dtype=dtype)

    output, lse = call(inputs, return_aux=varlen.AuxRequest(lse=True), **arguments)

    expected, expected_lse = by_sequence(*inputs, STARTS, KEY_STARTS, **features)
    tolerance = TOLERANCES[dtype]
    assert counted() == {("torch/sdpa", ""): 1}
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.T.double(), expected_lse, rtol=tolerance, atol=tolerance)


def test_heads_may_be_grouped(active) -> None:
    inputs = rows(kv_heads=2)

    output = call(inputs, enable_gqa=True)

    expected, _ = by_sequence(*inputs, STARTS, KEY_STARTS, causal=False)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_window_may_be_on_both_sides(active) -> None:
    inputs, starts = [torch.randn(12, 4, 64) for _ in range(3)], STARTS.clone()

    output = varlen_attn(*inputs, STARTS, starts, 6, 6, window_size=(2, 2))

    expected, _ = by_sequence(*inputs, STARTS, starts, causal=False, window=(2, 2))
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_only_the_first_keys_may_be_used(active) -> None:
    inputs, used = rows(), torch.tensor([6, 4, 7], dtype=torch.int32)

    output = call(inputs, seqused_k=used, window_size=(-1, 0))

    expected, _ = by_sequence(*inputs, STARTS, KEY_STARTS, used=used, causal=True)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    for wrong in (used + 3, used[:2], used - 6, used.float(), used[None]):
        with pytest.raises(TensorError, match="seqused_k"):
            call(inputs, seqused_k=wrong)


@pytest.mark.parametrize("used", [None, torch.tensor([5, 1, 6], dtype=torch.int32)], ids=["all keys", "used keys"])
def test_inputs_may_have_any_strides(used, active) -> None:
    inputs = [torch.randn(4, 64, one.shape[0]).permute(2, 0, 1) for one in rows()]

    output = call(inputs, seqused_k=used, num_splits=None if used is None else 1)

    expected, _ = by_sequence(*inputs, STARTS, KEY_STARTS, used=used, causal=False)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_output_may_be_given(active) -> None:
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    inputs = rows()
    out = torch.full_like(inputs[0], torch.nan)

    found, lse = varlen.varlen_attn_out(
        out, *inputs, STARTS, KEY_STARTS, *LONGEST, return_aux=varlen.AuxRequest(lse=True)
    )

    expected, expected_lse = by_sequence(*inputs, STARTS, KEY_STARTS, causal=False)
    assert found is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.T.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_no_sequences_have_an_empty_output(active) -> None:
    none, starts = torch.randn(0, 4, 64), torch.zeros(1, dtype=torch.int32)

    for splits in (None, 1):
        assert varlen_attn(none, none, none, starts, starts, 0, 0, num_splits=splits).shape == (0, 4, 64)


def by_torch(query, key, value, *, window=(-1, -1), scale=None):
    """Return the output of packed sequences, each by torch's own function with a mask."""
    outputs = []
    for (a, b), (c, d) in zip(pairwise(STARTS.tolist()), pairwise(KEY_STARTS.tolist()), strict=True):
        parts = [
            one[span].transpose(0, 1) for one, span in ((query, slice(a, b)), (key, slice(c, d)), (value, slice(c, d)))
        ]
        distance = torch.arange(d - c) - (torch.arange(b - a) + (d - c) - (b - a)).unsqueeze(1)
        left, right = (10**6 if side < 0 else side for side in window)
        visible = (distance >= -left) & (distance <= right)
        scores = (parts[0] @ parts[1].transpose(1, 2)) * (scale or 64**-0.5)
        outputs.append((scores.masked_fill(~visible, -torch.inf).softmax(-1) @ parts[2]).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0)])
def test_gradients_are_those_of_a_double_computation(window, active) -> None:
    inputs = [one.requires_grad_() for one in rows()]
    doubles = [one.detach().double().requires_grad_() for one in inputs]

    call(inputs, window_size=window, scale=0.2).square().sum().backward()
    by_torch(*doubles, window=window, scale=0.2).square().sum().backward()

    assert set(counted()) == {("torch/sdpa", ""), ("attnplug.dense", "")}
    for one, other in zip(inputs, doubles, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), min_size=1, max_size=5),
    st.integers(1, 3), st.integers(1, 3), st.sampled_from((8, 24, 64)), st.sampled_from(("none", "causal", "window")),
    st.sampled_from((None, 1, 4)), st.integers(0, 99),
)  # fmt: skip
def test_every_batch_has_the_result_of_the_oracle(lengths, kv_heads, ratio, size, mask, splits, seed) -> None:
    # A causal query is at a key: sequences have as many keys as queries at least. Others have a key.
    lengths = [(queries, more + (queries if mask != "none" else 1)) for queries, more in lengths]
    query_starts, key_starts = (
        torch.tensor([0, *accumulate(one)], dtype=torch.int32) for one in zip(*lengths, strict=True)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        query = torch.randn(int(query_starts[-1]), kv_heads * ratio, size)
        key, value = (torch.randn(int(key_starts[-1]), kv_heads, size) for _ in range(2))
    window = {"none": (-1, -1), "causal": (-1, 0), "window": (4, 0)}[mask]
    features = {"causal": mask != "none"} | ({"window": window} if mask == "window" else {})
    attnplug_torch.register()
    torch.nn.attention.activate_flash_attention_impl("attnplug")
    try:
        output, lse = varlen_attn(
            query, key, value, query_starts, key_starts, *map(max, zip(*lengths, strict=True)),
            window_size=window, enable_gqa=True, num_splits=splits, return_aux=varlen.AuxRequest(lse=True),
        )  # fmt: skip
    finally:
        torch.nn.attention.restore_flash_attention_impl()

    expected, expected_lse = by_sequence(query, key, value, query_starts, key_starts, **features)
    torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(lse.T.double(), expected_lse, rtol=2e-5, atol=2e-5)


REFUSED = {
    "uneven window": ({"window_size": (2, 1)}, "equal sides"),
    "open window": ({"window_size": (-1, 2)}, "equal sides"),
}


@pytest.mark.parametrize(("arguments", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_nothing_serves_is_an_error(arguments, reason, active) -> None:
    with pytest.raises(NotNegotiatedError, match=reason):
        call(rows(), **arguments)

    (route,) = attnplug_torch.report()
    assert route.refused
    assert reason in route.reason
    assert "refused" in str(route)


def test_a_refusal_of_every_backend_has_the_request(active) -> None:
    for _ in range(2):  # the second one is not decided again
        with pytest.raises(NoBackendError, match="sliding_window"):
            call(rows(), window_size=(2, 2))  # queries and keys of different lengths

    (route,) = attnplug_torch.report()
    assert route.calls == 2
    assert "no backend serves head_size=64" in route.reason


def test_lengths_that_change_in_place_are_read_anew(active) -> None:
    inputs, starts = [torch.randn(12, 4, 64) for _ in range(3)], torch.tensor([0, 6, 12, 12], dtype=torch.int32)

    for _ in range(2):
        output = varlen_attn(*inputs, STARTS, starts, 6, 6)
        expected, _ = by_sequence(*inputs, STARTS, starts, causal=False)
        torch.testing.assert_close(output.nan_to_num().double()[:6], expected[:6], rtol=1e-5, atol=1e-5)
        starts.copy_(STARTS)


def test_lengths_that_torch_does_not_see_change_are_read_anew(active) -> None:
    inputs, array = [torch.randn(12, 4, 64) for _ in range(3)], STARTS.clone().numpy()
    starts = torch.from_numpy(array)
    key_starts = starts.clone()

    for middle in (5, 3):
        array[1] = middle
        key_starts.data[1] = middle
        output = varlen_attn(*inputs, starts, key_starts, 6, 6)
        expected, _ = by_sequence(*inputs, starts, key_starts, causal=False)
        torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_refusal_ends_when_lengths_change_unseen(active) -> None:
    inputs, starts = [torch.randn(12, 4, 64) for _ in range(3)], torch.tensor([0, 6, 7, 12], dtype=torch.int32)
    for _ in range(2):
        with pytest.raises(NoBackendError, match="sliding_window"):
            varlen_attn(*inputs, STARTS, starts, 6, 6, window_size=(2, 2))

    starts.data.copy_(STARTS)

    output = varlen_attn(*inputs, STARTS, starts, 6, 6, window_size=(2, 2))
    expected, _ = by_sequence(*inputs, STARTS, starts, causal=False, window=(2, 2))
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["alibi_slopes", "seqused_k"])
def test_what_torchs_backward_drops_is_refused_with_gradients(name, active) -> None:
    """`_flash_attention_backward` has no such argument: the gradients would be those of another function."""
    more = {"alibi_slopes": torch.rand(4), "seqused_k": torch.tensor([6, 4, 7], dtype=torch.int32)}[name]
    inputs = [one.requires_grad_() for one in rows()]

    def forward():
        return torch.ops.aten._flash_attention_forward(
            *inputs, STARTS, KEY_STARTS, *LONGEST, 0.0, True, False, **{name: more}
        )[0]

    with pytest.raises(NotNegotiatedError, match=f"{name} where gradients are recorded"):
        forward()
    with torch.no_grad():
        assert forward().shape == inputs[0].shape


def test_a_backend_that_calls_the_operator_does_not_recurse(active, monkeypatch) -> None:
    """On the CPU torch has no operator of its own that such a call could run."""
    run = TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *given: (call(rows()), run(self, *given))[1])

    with pytest.raises(NotNegotiatedError, match="a backend of attnplug calls it"):
        call(rows())
    monkeypatch.setattr(TorchImpl, "run", run)
    assert call(rows()).shape == (12, 4, 64)


def test_other_calls_of_a_kind_that_is_served_are_decided_by_themselves(active) -> None:
    inputs, starts = [torch.randn(12, 4, 64) for _ in range(3)], STARTS.clone()
    varlen_attn(*inputs, STARTS, starts, 6, 6, window_size=(2, 2))

    with pytest.raises(NoBackendError, match="sliding_window"):
        call(rows(), window_size=(2, 2))  # queries and keys of different lengths
    with pytest.raises(TensorError, match="query_start_loc"):
        varlen_attn(*[one[:11] for one in inputs], STARTS, starts, 6, 6, window_size=(2, 2))


def test_double_precision_is_refused(active) -> None:
    with pytest.raises(NotNegotiatedError, match="float64"):
        call([one.double() for one in rows()])


def test_more_causal_queries_than_keys_are_refused(active) -> None:
    query, key, _ = rows()

    with pytest.raises(TensorError, match="causal queries"):
        varlen_attn(key, query, query, KEY_STARTS, STARTS, *reversed(LONGEST), window_size=(-1, 0))
    assert attnplug_torch.report()[0].refused


def test_a_backend_that_is_named_serves_or_the_call_is_an_error(active) -> None:
    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):
        call(rows())
    with attnplug.using(backend="torch"):
        call(rows())

    assert served() == 1


def test_the_operator_is_gone_after_a_restoration(active) -> None:
    active.restore_flash_attention_impl()

    # NotImplementedError, unless a fake of other tests has registered one, which refuses.
    with pytest.raises(RuntimeError):
        call(rows())
    assert counted() == {}


def test_arguments_of_a_newer_torch_are_not_dropped(active) -> None:
    from attnplug_torch import packed  # noqa: PLC0415 - imports torch
    from attnplug_torch.decisions import RefusedError  # noqa: PLC0415 - likewise

    given = (*rows(), STARTS, KEY_STARTS, *LONGEST, 0.0, False, False)
    packed.forward(*given, sinks=None)
    with pytest.raises(RefusedError, match="'sinks'"):
        packed.forward(*given, sinks=torch.zeros(4))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cum_seq_q": None}, "not packed"),
        ({"cum_seq_k": None}, "cu_seq_k is None"),
        ({"dropout_p": 0.5}, "dropout_p=0.5"),
        ({"return_debug_mask": True}, "return_debug_mask"),
        ({"alibi_slopes": torch.zeros(3, 4)}, "alibi_slopes of each sequence"),
        ({"block_table": torch.zeros(3, 1, dtype=torch.int32)}, "without seqused_k"),
    ],
)
def test_other_calls_of_the_operator_are_refused_by_reason(changes, reason) -> None:
    from attnplug_torch import packed  # noqa: PLC0415 - imports torch
    from attnplug_torch.decisions import RefusedError  # noqa: PLC0415 - likewise

    names = ("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k")
    given = dict(zip(names, (*rows(), STARTS, KEY_STARTS, *LONGEST), strict=True))
    given |= {"dropout_p": 0.0, "is_causal": False, "return_debug_mask": False}
    with pytest.raises(RefusedError, match=reason):
        packed.forward(**{**given, **changes})


def test_alibi_slopes_are_served(active) -> None:
    inputs, slopes = rows(), torch.tensor([0.5, 0.25, 0.1, 0.05])

    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        *inputs, STARTS, KEY_STARTS, *LONGEST, 0.0, True, False, alibi_slopes=slopes
    )

    expected, expected_lse = by_sequence(*inputs, STARTS, KEY_STARTS, causal=True, alibi="linear", alibi_slopes=slopes)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.T.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_short_sequences_are_decided_where_long_ones_of_their_kind_are_served(active, monkeypatch) -> None:
    decided, decide = [], layers.backend_of
    monkeypatch.setattr(layers, "backend_of", lambda call: (decided.append(call.max_seq_len), decide(call))[1])

    for longest in (5000, 9, 5000, 9):
        varlen_attn(*rows(), STARTS, KEY_STARTS, 6, longest, window_size=(-1, 0))

    assert decided == [5000, 9]


@pytest.mark.parametrize(("hip", "expected"), [(None, True), ("6.3", False)])
def test_an_amd_device_has_no_flash_attention_2(hip: str | None, expected: bool, monkeypatch) -> None:
    """An MI300X reports capability 9.4, of another instruction set."""
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 4))
    monkeypatch.setattr("torch.version.hip", hip)
    tensor = SimpleNamespace(is_cuda=True, shape=(8, 4, 64), dtype=torch.bfloat16, device="cuda:0")

    assert layers._has_flash(SimpleNamespace(query=tensor, value=tensor, block_table=None)) is expected
