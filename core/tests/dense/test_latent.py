"""Prefill over a cached prefix of latents: the result is that of all keys at once, in bounded memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.contract import Batch
from attnplug.dense import latent, latent_prefill
from attnplug.dense.latent import prefix_chunks
from attnplug.errors import BatchError, LimitsError, TensorError
from attnplug.ops import dequantize_latents, quantize_latents, write_latents
from tests.backends.harness import no_synchronization
from tests.examples import examples

HEADS, NOPE, ROPE, RANK, VALUE = 3, 6, 2, 8, 5
SCALE = 0.31


class Scene:
    """A step with random latents in shuffled blocks, and NaN in unused slots."""

    def __init__(self, query_lens, context_lens, block_size=4, dtype=torch.float64, cache_dtype=None):
        source = torch.Generator().manual_seed(sum(query_lens) + sum(context_lens))
        draw = lambda *shape: torch.randn(shape, generator=source, dtype=torch.float64)  # noqa: E731 - one line
        seq_lens = [query + context for query, context in zip(query_lens, context_lens, strict=True)]
        columns = max(1, *(-(-length // block_size) for length in seq_lens))
        order = torch.randperm(len(seq_lens) * columns, generator=source) + 1
        self.table = order.view(len(seq_lens), columns).int()
        self.keys_up, self.values_up = draw(HEADS, NOPE, RANK), draw(HEADS, VALUE, RANK)
        self.latents = [draw(length, RANK + ROPE) for length in seq_lens]
        pages = torch.full((len(order) + 1, block_size, 1, RANK + ROPE), torch.nan, dtype=torch.float64)
        for row, latents in zip(self.table.long(), self.latents, strict=True):
            positions = torch.arange(len(latents))
            pages[row[positions // block_size], positions % block_size, 0] = latents
        self.pages = pages.to(cache_dtype or dtype)
        self.latents = [rows.to(self.pages.dtype).double() for rows in self.latents]
        self.queries = [draw(length, HEADS, NOPE + ROPE) for length in query_lens]
        self.batch = Batch.from_lengths(query_lens, seq_lens, block_table=self.table)
        self.dtype, self.context_lens, self.rows = dtype, context_lens, []

    def expand(self, latents):
        """Return keys and values per head, and note how many rows there are."""
        self.rows.append(len(latents))
        compressed, rotated = latents.split([RANK, ROPE], -1)
        key, value = (
            torch.einsum("tl,nsl->tns", compressed, weight.to(latents.dtype))
            for weight in (self.keys_up, self.values_up)
        )
        return torch.cat([key, rotated[:, None].expand(-1, HEADS, -1)], -1), value

    def to(self, device):
        """Move the step to a device. Its expected result is computed before."""
        lengths = [len(rows) for rows in self.latents]
        self.batch = Batch.from_lengths(
            [len(rows) for rows in self.queries], lengths, block_table=self.table, device=device
        )
        self.keys_up, self.values_up = self.keys_up.to(device), self.values_up.to(device)
        self.latents, self.queries = ([rows.to(device) for rows in one] for one in (self.latents, self.queries))
        self.pages = self.pages.to(device)

    def expected(self):
        """Return the attention over all keys at once, in float64."""
        outputs, sums = [], []
        for query, latents, context in zip(self.queries, self.latents, self.context_lens, strict=True):
            key, value = self.expand(latents)
            scores = torch.einsum("qhs,khs->hqk", query, key) * SCALE
            later = torch.arange(len(key)) > context + torch.arange(len(query))[:, None]
            scores = scores.masked_fill(later, -torch.inf)
            outputs.append(torch.einsum("hqk,khv->qhv", scores.softmax(-1), value))
            sums.append(scores.logsumexp(-1).T)
        self.rows.clear()
        return torch.cat(outputs), torch.cat(sums)

    def run(self, **how):
        """Return what `latent_prefill` computes."""
        new = torch.cat([rows[context:] for rows, context in zip(self.latents, self.context_lens, strict=True)])
        key, value = self.expand(new.to(self.dtype))
        self.rows.clear()
        query = torch.cat(self.queries).to(self.dtype)
        return latent_prefill(query, key, value, self.pages, self.batch, self.expand, scale=SCALE, **how)


@settings(max_examples=examples(60))
@given(
    requests=st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 0, 1, 3, 4, 9, 17])), min_size=1, max_size=5),
    block_size=st.sampled_from([1, 3, 4]),
    max_rows=st.integers(1, 40),
)
def test_it_attends_to_the_whole_prefix(requests, block_size, max_rows):
    query_lens, context_lens = map(list, zip(*requests, strict=True))
    scene = Scene(query_lens, context_lens, block_size, torch.float32)
    expected, expected_lse = scene.expected()

    out, lse = scene.run(max_rows=max_rows)

    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)
    assert max(scene.rows, default=0) <= max_rows
    assert sum(scene.rows) == sum(context_lens)  # none twice


@given(context_lens=st.lists(st.integers(0, 30), max_size=8), max_rows=st.integers(1, 20))
def test_chunks_have_each_cached_token_once(context_lens, max_rows):
    chunks = list(prefix_chunks(context_lens, max_rows))

    found = [
        (chunk.first + number, token)
        for chunk in chunks
        for number, (start, length) in enumerate(zip(chunk.starts, chunk.lengths, strict=True))
        for token in range(start, start + length)
    ]
    assert found == [(number, token) for number, length in enumerate(context_lens) for token in range(length)]
    assert all(0 < sum(chunk.lengths) <= max_rows and min(chunk.lengths) > 0 for chunk in chunks)
    assert all(not any(chunk.starts[1:]) for chunk in chunks)


def test_fp8_latents_have_their_scale():
    scene = Scene([3, 2], [5, 0], dtype=torch.float32, cache_dtype=torch.float8_e4m3fn)
    scale = torch.tensor([2.0])
    scene.latents = [2 * rows for rows in scene.latents]
    expected, expected_lse = scene.expected()

    out, lse = scene.run(k_scale=scale, max_rows=2)

    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-4, atol=1e-4)


def test_records_are_widened():
    rows = torch.randn(7, 1, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages, batch = (
        torch.full((3, 4, 1, 656), 255, dtype=torch.uint8),
        Batch.from_lengths([2], [7], block_table=torch.tensor([[2, 1]], dtype=torch.int32)),
    )
    write_latents(rows[:5], pages, torch.tensor([8, 9, 10, 11, 4]))
    seen: list[torch.Tensor] = []

    def expand(latents):
        seen.append(latents.clone())
        return latents[:, None, 512:], latents[:, None, :8]

    key, value = rows[5:, :, 512:], rows[5:, :, :8]
    out, _ = latent_prefill(key, key, value, pages, batch, expand, scale=SCALE)

    (latents,) = seen
    assert torch.equal(latents, dequantize_latents(quantize_latents(rows[:5]), rows[:5].clone())[:, 0])
    assert bool(out.isfinite().all())


def test_padded_requests_are_left_out():
    """Their rows of the block table have no latents, and their lengths no keys."""
    scene = Scene([3, 2, 0], [5, 4, 0], dtype=torch.float32)
    expected, _ = scene.expected()

    torch.testing.assert_close(scene.run(max_rows=4)[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert scene.rows == [4, 4, 1]


def test_chunks_are_planned_once_for_a_batch(monkeypatch):
    scene = Scene([3, 2], [5, 4], dtype=torch.float32)
    plan, planned = latent.prefix_chunks, []
    monkeypatch.setattr(latent, "prefix_chunks", lambda *given: planned.append(given) or plan(*given))

    first, _ = scene.run(max_rows=4)
    second, _ = scene.run(max_rows=4)

    assert planned == [([5, 4], 4)]
    assert torch.equal(first, second)


@pytest.mark.gpu
@pytest.mark.parametrize(("cache_dtype", "scale"), [(None, None), (torch.float8_e4m3fn, 2.0)])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device(cache_dtype, scale):
    scene = Scene([300, 5, 70], [700, 0, 90], 16, torch.float32, cache_dtype)
    scene.latents = [(scale or 1) * rows for rows in scene.latents]
    expected, _ = scene.expected()
    scene.to("cuda")
    how = {"max_rows": 256, "k_scale": None if scale is None else torch.tensor([scale], device="cuda")}
    scene.run(**how)  # decides, and compiles
    scene.batch.derived.clear()  # chunks are planned again

    with no_synchronization():
        out, _ = scene.run(**how)

    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-3, atol=1e-3)


def test_what_does_not_fit_is_refused():
    scene = Scene([3], [5], dtype=torch.float32)

    with pytest.raises(LimitsError, match="max_rows=0 was given"):
        scene.run(max_rows=0)
    batch, scene.batch = scene.batch, Batch.from_lengths([3], [3])
    with pytest.raises(BatchError, match="without block_table"):
        scene.run()
    scene.batch, scene.pages = batch, scene.pages.expand(-1, -1, 2, -1)
    with pytest.raises(TensorError, match=r"\(3, 4, 2, 10\) was given"):
        scene.run()
    scene.pages = torch.zeros(3, 4, 1, 576, dtype=torch.uint8)
    with pytest.raises(TensorError, match=r"(?s)\(3, 4, 1, 576\) torch.uint8 was given.*656 bytes"):
        scene.run()
