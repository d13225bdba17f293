"""Masks are compared with the negotiated pattern, and padding is left out, for any padding, KV cache and window."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import masking_utils

from attnplug.errors import NotNegotiatedError, TensorError
from attnplug_transformers.mask import DenseMask, default_mask, make_mask
from attnplug_transformers.packing import Pattern, pack

HEADS, SIZE = 2, 3
CAUSAL = Pattern(causal=True)
BOTH_WAYS = Pattern(causal=False)


def causal(w=None, chunk=None, starts=None):
    """Return the library's own mask function."""
    if chunk is not None:
        return masking_utils.chunked_causal_mask_function(chunk, starts)
    return masking_utils.causal_mask_function if w is None else masking_utils.sliding_window_causal_mask_function(w)


def mask_of(function, queries, keys, *, batch=1, q_offset=0, kv_offset=0, padding=None, use_vmap=False):
    return make_mask(
        batch_size=batch,
        q_length=queries,
        kv_length=keys,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=function,
        attention_mask=padding,
        use_vmap=use_vmap,
        allow_is_causal_skip=True,
        dtype=torch.float32,
        config=None,
    )


def dense(mask):
    return torch.cat([piece for _, piece in mask.rows()], 1)


def attention(query, key, value, mask):
    """Return softmax attention of ``(..., queries, size)``; rows without keys are zero."""
    scores = (query @ key.transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    return torch.nan_to_num(scores.softmax(-1)) @ value


def pack_up(mask, pattern, layer="layer"):
    return pack(mask, pattern, layer, torch.device("cpu"))


def through_packing(mask, pattern, query, key, value):
    """Attend sequence by sequence on packed tensors, as in the contract, and unpack."""
    packing = pack_up(mask, pattern)
    if packing.batch is None:
        return torch.zeros_like(query).transpose(1, 2)
    q, k, v = packing.pack_queries(query), packing.pack_keys(key), packing.pack_keys(value)
    starts, key_starts = packing.batch.query_start_loc.tolist(), packing.batch.key_start_loc.tolist()
    output = torch.empty_like(q)
    for i, length in enumerate(packing.batch.seq_lens.tolist()):
        rows, keys = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
        positions = torch.arange(length)
        seen = pattern.attends(positions[length - (starts[i + 1] - starts[i]) :, None], positions)
        found = attention(q[rows].transpose(0, 1), k[keys].transpose(0, 1), v[keys].transpose(0, 1), seen)
        output[rows] = found.transpose(0, 1)
    assert k.shape[0] == key_starts[-1]
    return packing.unpack(output, torch.zeros_like(query.transpose(1, 2)))


def assert_same(mask, pattern, rows=None):
    """Check that attention through the packing is attention under the mask, at the real tokens."""
    batch, _, queries, keys = mask.shape
    source = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(batch, HEADS, n, SIZE, generator=source) for n in (queries, keys, keys))

    found = through_packing(mask, pattern, query, key, value).transpose(1, 2)

    expected = attention(query, key, value, dense(mask)[:, None])
    rows = torch.ones(batch, queries, dtype=torch.bool) if rows is None else rows
    torch.testing.assert_close(found.transpose(1, 2)[rows], expected.transpose(1, 2)[rows])


@st.composite
def steps(draw):
    """Draw a step of a decoder: cached tokens, new ones, padding on one side, a window or chunks, a kind of cache."""
    batch, cached, new = draw(st.integers(1, 4)), draw(st.integers(0, 9)), draw(st.integers(1, 9))
    total = cached + new
    kind = draw(st.sampled_from(["full", "window", "chunk"]))
    width = draw(st.integers(1, 7))
    room = draw(st.integers(0, 4)) if kind == "full" else 0  # unused slots of a static KV cache
    # A sliding KV cache returns the last width - 1 cached tokens only.
    dropped = max(0, cached - (width - 1)) if kind != "full" and draw(st.booleans()) else 0
    lengths = draw(st.lists(st.integers(0, total), min_size=batch, max_size=batch))
    right = draw(st.booleans()) if cached == 0 else False
    mask = torch.zeros(batch, total, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, slice(0, length) if right else slice(total - length, None)] = True
    padding = mask if draw(st.booleans()) or not mask.all() else None
    return batch, cached, new, kind, width, room, dropped, padding


@given(steps())
def test_attention_through_the_packing_is_attention_under_the_mask(step):
    _, cached, _, kind, width, _, _, padding = step
    pattern = Pattern(True, left=width - 1 if kind == "window" else None, chunk=width if kind == "chunk" else None)

    real = None if padding is None else padding[:, cached:]

    assert_same(step_mask(step), pattern, real)


def step_mask(step):
    """Return the mask of a drawn step."""
    batch, cached, new, kind, width, room, dropped, padding = step
    starts = torch.zeros(batch, dtype=torch.long) if padding is None else (padding.cumsum(1) == 0).sum(1)
    function = causal(width if kind == "window" else None, width if kind == "chunk" else None, starts)
    keys = cached + new + room - dropped
    return mask_of(function, new, keys, batch=batch, q_offset=cached, kv_offset=dropped, padding=padding)


@given(st.integers(1, 3), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.data())
def test_encoders_through_the_packing(batch, tokens, side, windowed, data):
    lengths = data.draw(st.lists(st.integers(1, tokens), min_size=batch, max_size=batch))
    padding = torch.arange(tokens) < torch.tensor(lengths)[:, None]
    function = (
        masking_utils.sliding_window_bidirectional_mask_function(side)
        if windowed
        else masking_utils.bidirectional_mask_function
    )
    pattern = Pattern(False, side, side) if windowed else BOTH_WAYS

    assert_same(mask_of(function, tokens, tokens, batch=batch, padding=padding), pattern, padding)


def test_cross_attention_keeps_every_query():
    padding = torch.tensor([[True, True, False], [True, True, True]])

    assert_same(mask_of(masking_utils.bidirectional_mask_function, 5, 3, batch=2, padding=padding), BOTH_WAYS)


def test_decodes_come_first():
    padding = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()

    batch = pack_up(mask_of(causal(), 4, 4, batch=4, padding=padding), CAUSAL).batch

    assert batch.query_start_loc.tolist() == [0, 1, 2, 5, 9]
    assert batch.seq_lens.tolist() == [1, 1, 3, 4]


def test_unused_keys_are_left_out():
    window = Pattern(True, left=2)

    batch = pack_up(mask_of(causal(3), 1, 10, q_offset=9), window).batch

    assert batch.key_start_loc.tolist() == [0, 3]


def test_without_padding_nothing_is_gathered():
    packing = pack_up(mask_of(causal(), 4, 4, batch=2), CAUSAL)
    query = torch.randn(2, HEADS, 4, SIZE)

    assert packing.queries is None
    assert packing.keys is None
    assert torch.equal(packing.unpack(packing.pack_queries(query), query.transpose(1, 2)), query.transpose(1, 2))


def test_a_mask_is_packed_once_for_all_layers():
    mask = mask_of(causal(), 4, 4)

    assert pack_up(mask, CAUSAL, "a") is pack_up(mask, CAUSAL, "b")


def test_a_large_mask_is_evaluated_in_slices(monkeypatch):
    monkeypatch.setattr("attnplug_transformers.mask.ELEMENTS_AT_ONCE", 16)
    padding = torch.ones(2, 8, dtype=torch.bool)
    padding[0, :5] = False

    assert_same(mask_of(causal(3), 8, 8, batch=2, padding=padding), Pattern(True, left=2), padding)
    with pytest.raises(NotNegotiatedError, match="query 3 of sequence 1 does not attend to key 0"):
        pack_up(mask_of(causal(3), 8, 8, batch=2, padding=padding), Pattern(True, left=3))


def prefix(batch, head, query, key):
    return (key <= query) | (key < 3)


def packed(batch, head, query, key):
    return (key <= query) & ((key < 3) == (query < 3))


def anti_causal(batch, head, query, key):
    return key >= query


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (causal(), Pattern(True, left=2)),
        (causal(3), CAUSAL),
        (causal(3), Pattern(True, left=1)),
        (causal(3), Pattern(True, left=3)),
        (causal(), Pattern(True, chunk=4)),
        (causal(chunk=4, starts=torch.zeros(1, dtype=torch.long)), CAUSAL),
        (causal(chunk=4, starts=torch.ones(1, dtype=torch.long)), Pattern(True, chunk=4)),
        (causal(), BOTH_WAYS),
        (masking_utils.bidirectional_mask_function, CAUSAL),
        (masking_utils.bidirectional_mask_function, Pattern(False, 2, 2)),
        (masking_utils.sliding_window_bidirectional_mask_function(2), BOTH_WAYS),
        (masking_utils.sliding_window_bidirectional_mask_function(2), Pattern(False, 3, 3)),
        (prefix, CAUSAL),
        (packed, CAUSAL),
        (anti_causal, CAUSAL),
        (anti_causal, BOTH_WAYS),
        (masking_utils.or_masks(causal(), prefix), CAUSAL),
        (masking_utils.and_masks(causal(), packed), CAUSAL),
    ],
)
@pytest.mark.parametrize("vmap", [False, True])
def test_a_mask_that_differs_from_the_pattern_is_refused(function, pattern, vmap):
    with pytest.raises(NotNegotiatedError, match=r"layers\.3: by the mask") as refused:
        pack_up(mask_of(function, 7, 7, use_vmap=vmap), pattern, "layers.3")

    assert str(pattern) in refused.value.expected
    assert "attn_implementation='eager'" in refused.value.fix


def test_a_hole_in_the_padding_of_a_windowed_layer_is_refused():
    padding = torch.tensor([[1, 1, 0, 1, 1, 1]]).bool()

    with pytest.raises(NotNegotiatedError, match="holes in the padding"):
        pack_up(mask_of(causal(3), 6, 6, padding=padding), Pattern(True, left=2))
    assert_same(mask_of(causal(), 6, 6, padding=padding), CAUSAL, padding)


def test_the_offset_of_a_static_cache_is_read_when_the_mask_is_made():
    offset = torch.tensor(4)
    mask = mask_of(causal(), 1, 8, q_offset=offset)

    offset.add_(1)  # as the cache of the first layer does

    assert pack_up(mask, CAUSAL).batch.seq_lens.tolist() == [5]


def test_a_prepared_mask_is_passed_through():
    mask = mask_of(causal(), 3, 3)

    assert make_mask(batch_size=1, q_length=3, kv_length=3, attention_mask=mask) is mask
    assert mask.contiguous() is mask
    assert (mask.ndim, tuple(mask.shape), mask.dtype) == (4, (1, 1, 3, 3), torch.bool)


@pytest.mark.parametrize(
    "compute",
    [
        lambda mask: mask[:, :, :, :2],
        lambda mask: mask + 1,
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: torch.ones(3) * mask,
    ],
)
def test_computing_with_a_mask_is_refused(compute):
    with pytest.raises(NotNegotiatedError, match="computes with its attention mask"):
        compute(mask_of(causal(), 3, 3))


@given(steps(), st.data())
def test_a_slice_of_the_queries_is_their_rows(step, data):
    mask = step_mask(step)
    start = data.draw(st.integers(0, mask.q_length))
    stop = data.draw(st.integers(start, mask.q_length))

    sliced = mask[:, :, start:stop, :]

    assert sliced.shape == (mask.batch_size, 1, stop - start, mask.kv_length)
    if stop > start:
        assert torch.equal(dense(sliced), dense(mask)[:, start:stop])
        assert sliced.is_padding() is None or torch.equal(sliced.is_padding(), mask.is_padding()[:, start:stop])


@pytest.mark.parametrize("index", [0, ..., (0, 0), (slice(None), slice(None), 0, slice(None)), (slice(1),) * 4])
def test_other_slices_of_a_mask_are_refused(index):
    with pytest.raises(NotNegotiatedError, match="computes with its attention mask"):
        mask_of(causal(), 4, 4)[index]


class TestDenseMask:
    """Masks that the caller prepared."""

    def lower(self, queries=4, keys=4):
        return torch.ones(1, 1, queries, keys, dtype=torch.bool).tril(keys - queries)

    def test_boolean_and_additive_masks_are_equal(self):
        lowest = torch.zeros(1, 1, 4, 4).masked_fill(~self.lower(), torch.finfo(torch.float32).min)
        infinite = torch.zeros(1, 1, 4, 4).masked_fill(~self.lower(), -torch.inf)

        for given_mask in (self.lower(), lowest, infinite):
            assert_same(DenseMask.of(given_mask, 2, 4, 4), CAUSAL)

    def test_left_padding_in_a_prepared_mask(self):
        prepared = self.lower().repeat(2, 1, 1, 1)
        prepared[0, :, :, :2] = False

        packing = pack_up(DenseMask.of(prepared, 2, 4, 4), CAUSAL)

        assert packing.batch.seq_lens.tolist() == [2, 4]

    def test_a_row_for_all_queries(self):
        one_row = torch.tensor([[[[True, True, False]]]])

        assert_same(DenseMask.of(one_row, 2, 3, 3), BOTH_WAYS)

    def test_right_padding_looks_like_a_lost_query(self):
        prepared = self.lower()
        prepared[..., 2:] = False

        with pytest.raises(NotNegotiatedError, match="query 2 of sequence 0 attends to nothing newer"):
            pack_up(DenseMask.of(prepared, 1, 4, 4), CAUSAL)

    def test_heads_that_differ_are_refused(self):
        with pytest.raises(NotNegotiatedError, match="all heads"):
            DenseMask.of(self.lower().repeat(1, 2, 1, 1), 1, 4, 4)
        assert_same(DenseMask.of(self.lower().expand(1, 2, 4, 4), 1, 4, 4), CAUSAL)

    def test_a_bias_is_refused(self):
        with pytest.raises(NotNegotiatedError, match="a bias on the scores"):
            DenseMask.of(torch.tensor([[[[0.0, -1.5]]]]), 1, 1, 2)
        with pytest.raises(NotNegotiatedError, match=r"a torch.int64 attention_mask"):
            DenseMask.of(torch.tensor([[[[0, 1]]]]), 1, 1, 2)

    @pytest.mark.parametrize("shape", [(4, 4), (1, 1, 4, 5), (3, 1, 4, 4), (1, 1, 3, 4), (1, 1, 4, 1)])
    def test_another_shape_is_refused(self, shape):
        with pytest.raises(TensorError, match=r"is of shape \(2, 1, 4, 4\)"):
            DenseMask.of(torch.ones(shape, dtype=torch.bool), 2, 4, 4)

    def test_a_prepared_window_of_an_encoder(self):
        near = torch.ones(5, 5, dtype=torch.bool).tril(1).triu(-1)[None, None]

        assert_same(DenseMask.of(near, 2, 5, 5), Pattern(False, 1, 1))

    def test_a_window_requires_the_key_of_each_query(self):
        near = torch.ones(4, 6, dtype=torch.bool).tril(1).triu(-1)[None, None]

        with pytest.raises(NotNegotiatedError):
            pack_up(DenseMask.of(near, 1, 4, 6), Pattern(False, 1, 1))


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (1, 6)])
def test_without_a_mask_tokens_attend_up_to_themselves(queries, keys):
    mask = default_mask(2, queries, keys, causal=True, device=torch.device("cpu"))

    assert_same(mask, CAUSAL)
    with pytest.raises(NotNegotiatedError):
        pack_up(mask, Pattern(True, left=1))


def test_a_call_without_queries_is_refused():
    with pytest.raises(NotNegotiatedError, match="without queries"):
        pack_up(mask_of(causal(), 0, 4), CAUSAL)


def test_no_mask_and_more_keys_than_queries_is_refused():
    with pytest.raises(NotNegotiatedError, match="only a mask determines the positions"):
        default_mask(1, 2, 5, causal=True, device=torch.device("cpu"))
    assert_same(default_mask(1, 2, 5, causal=False, device=torch.device("cpu")), BOTH_WAYS)


@pytest.mark.parametrize("padding", [None, torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)])
def test_the_cpu_reads_a_mask_once(padding, monkeypatch) -> None:
    """Each read of a tensor on a device waits for all work before it."""
    mask, read = mask_of(causal(), 5, 5, batch=2, padding=padding), []
    for name in ("tolist", "item", "__bool__", "__int__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, name=name, plain=plain: (read.append(name), plain(self))[1]
        )
    packing = pack_up(mask, CAUSAL)
    monkeypatch.undo()

    assert packing.batch.seq_lens.tolist() == ([5, 5] if padding is None else [4, 5])
    assert read == ["tolist"]
