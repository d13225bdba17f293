"""Sparse attention over latents: the tokens are those of transformers, whatever is in the batch, in bounded memory."""

from __future__ import annotations

import logging
from functools import lru_cache

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug_transformers.engine import Engine, indexer
from attnplug_transformers.engine.indexer import Indexers, IndexStep
from attnplug_transformers.engine.schedule import Step
from hosts.transformers.tests.engine.test_families import changed, made_of
from hosts.transformers.tests.engine.test_runner import scheduled
from hosts.transformers.tests.models import PAD, generate

NEW, TOPK = 8, 8


@lru_cache
def reference(model_type="deepseek_v32"):
    """Return a model that selects 8 tokens, prompts of up to 45, and what transformers' own attention generates."""
    fields = {"index_topk": TOPK, "index_n_heads": 16, "max_position_embeddings": 128}
    implementation = "eager" if model_type == "hy_v4" else "sdpa"  # it has sinks
    for seed in range(16):
        made = made_of(changed(model_type, **fields), seed, implementation)
        prompts = _prompts(seed)
        found = [generate(made, ids := torch.tensor([one]), torch.ones_like(ids), NEW) for one in prompts]
        if min(margin for _, margin in found) > 5e-4:
            return made, prompts, [tokens[0].tolist() for tokens, _ in found]
    raise AssertionError


def _prompts(seed):
    """Most are longer than the selection; one begins as another, and one is shorter."""
    source = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, PAD, (length,), generator=source).tolist() for length in (40, 5, 17, 33)]
    return [*drawn, drawn[0][:24] + drawn[2], drawn[3]]


@pytest.fixture
def passes(monkeypatch):
    """Record the queries and keys of each forward pass."""
    found, make = [], IndexStep.of.__func__

    def recorded(cls, batch, *given):
        found.append((batch.num_actual_tokens, int(batch.seq_lens.sum())))
        return make(cls, batch, *given)

    monkeypatch.setattr(IndexStep, "of", classmethod(recorded))
    return found


HOW = {
    "whole prompts": {},
    "chunks beside decodes": {"max_num_tokens": 9, "max_num_reqs": 4, "block_size": 4},
    "few blocks": {"max_num_tokens": 24, "max_num_reqs": 6, "block_size": 4, "num_blocks": 20, "prefix_caching": False},
    "steps ahead": {"async_scheduling": True, "block_size": 4},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_tokens_are_those_of_transformers(host, how):
    made, prompts, expected = reference()

    with Engine(made, max_seq_len=64, **how) as engine:
        assert engine.generate(prompts, max_new_tokens=NEW) == expected
        assert engine.generate(prompts, max_new_tokens=NEW) == expected  # from cached prefixes
        assert {one.requirements.topk for one in engine.selections.values()} == {TOPK}
        assert "an indexer selects" in engine.why_absorbed
        assert engine.num_graphs == 0


@pytest.mark.parametrize("model_type", ["glm_moe_dsa", "hy_v4", "axk2"])
def test_layers_that_share_a_selection(host, model_type):
    made, prompts, expected = reference(model_type)

    with Engine(made, max_num_tokens=20, max_num_reqs=5, block_size=4, max_seq_len=64) as engine:
        assert engine.generate(prompts, max_new_tokens=NEW) == expected


def test_the_selection_decides(host, monkeypatch):
    """Tokens that a row may not attend to are left out, though the indexer has to name some."""
    made, prompts, expected = reference()
    select = IndexStep.select

    def unmasked(self, chosen):
        return select(attrs.evolve(self, mask=torch.ones_like(self.mask)), chosen)

    monkeypatch.setattr(IndexStep, "select", unmasked)
    with Engine(made, max_seq_len=64) as engine:
        assert engine.generate(prompts, max_new_tokens=NEW) != expected


@pytest.mark.parametrize("max_pairs", [1, 300, 2000])
def test_forward_passes_score_bounded_pairs(host, monkeypatch, passes, max_pairs):
    made, prompts, expected = reference()
    monkeypatch.setattr(indexer, "SCORE_BYTES", 4 * 16 * max_pairs)

    with Engine(made, max_num_tokens=30, max_num_reqs=4, block_size=4, max_seq_len=64) as engine:
        assert engine.generate(prompts, max_new_tokens=NEW) == expected

    assert all(tokens * keys <= max_pairs or tokens == 1 for tokens, keys in passes)
    assert max(tokens * keys for tokens, keys in passes) > max_pairs // 2


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=6),
    st.integers(1, 400),
    st.booleans(),
)
def test_passes_are_a_step(requests, max_pairs, is_ahead):
    given_ones = [scheduled(list(range(start + count)), [], start, count) for count, start in requests]
    follows = tuple(range(len(given_ones)))[::-1] if is_ahead else None

    found = list(Indexers(TOPK, max_pairs).passes(Step(tuple(given_ones), follows)))

    for one in found:
        pairs = one.num_tokens * sum(part.stop for part in one)
        assert pairs <= max_pairs or (len(one), one.num_tokens) == (1, 1)
    for one in given_ones:
        parts = [part for step in found for part in step if part.request is one.request]
        assert [part.start for part in parts] == [one.start, *(part.stop for part in parts[:-1])]
        assert (parts[-1].stop, [part.samples for part in parts]) == (one.stop, [False] * (len(parts) - 1) + [True])
    assert [request for step in found for request in step.sampling] == [one.request for one in given_ones]
    if is_ahead and all(count == 1 for count, _ in requests):
        assert [place for step in found for place in step.follows] == list(follows)


def test_keys_of_indexers_are_counted_and_freed(host):
    made, _, _ = reference("glm_moe_dsa")  # half of its layers have an indexer

    engine = Engine(made, max_seq_len=64, num_blocks=9, block_size=4)
    pages = engine._runner._index_pages
    latents = [one for cache in engine._runner._caches.values() for one in cache.storages]

    assert {number: tuple(one.shape) for number, one in pages.items()} == dict.fromkeys((0, 2), (9, 4, 1, 8))
    every = sum(one.nbytes for one in (*pages.values(), *latents))
    assert 9 * engine._groups.bytes_per_block == every
    engine.close()
    assert not engine._runner._index_pages


def test_fp8_latents(host, caplog):
    made, prompts, expected = reference()

    with caplog.at_level(logging.WARNING), Engine(made, max_seq_len=64, kv_cache_dtype="fp8") as engine:
        found = engine.generate(prompts, max_new_tokens=1)

    assert sum(one == other[:1] for one, other in zip(found, expected, strict=True)) >= len(prompts) // 2
    assert not caplog.records


def test_a_profile_run_scores_as_many_pairs_as_a_step_may(host, monkeypatch):
    made, _, _ = reference()
    monkeypatch.setattr(indexer, "SCORE_BYTES", 4 * 16 * 150)
    seen = []
    hook = made.model.layers[0].self_attn.indexer.register_forward_pre_hook(
        lambda _, given, named: seen.append(given[3].shape), with_kwargs=True
    )

    with Engine(made, max_seq_len=64) as engine:
        seen.clear()
        engine._runner.profile(100, 3, 64)
    hook.remove()

    assert seen == [(1, 12, 12)]
