"""The built-in backend on KV caches of every form, layout, block size and dtype: the oracle's results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import Backend, split_kv
from attnplug.errors import CacheError
from attnplug_kit.oracle import Case, SceneRunner, check, materialize, untouched
from tests.examples import examples

FORMS = ("joint", "interleaved", "split", "packed", "independent")
LENGTHS = {
    "prefill": ((5, 18), (0, 0)),
    "chunked": ((7, 3), (21, 2)),
    "decode": ((1, 1, 1), (40, 0, 15)),
    "mixed": ((1, 1, 9), (30, 4, 11)),
}


def load(case: Case, form: str, layout: str) -> Backend:
    requirements = case.requirements(block_size=case.block_size, kv_layout=layout, kv_cache_form=form)
    backend = attnplug.load(requirements, "cpu", backend="torch/sdpa")
    assert backend.agreement.kv_cache_form == form
    return backend


@given(
    st.sampled_from(FORMS),
    st.sampled_from(["NHD", "HND"]),
    st.sampled_from([1, 4, 12, 16]),
    st.sampled_from([("float32", "auto"), ("bfloat16", "auto"), ("float16", "auto"), ("bfloat16", "fp8_e4m3")]),
    st.sampled_from(list(LENGTHS)),
    st.sampled_from([None, 8, 24]),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=examples(150))
def test_every_form_has_the_oracle_s_result(form, layout, block_size, dtypes, phase, size_v, host_writes, seed) -> None:
    """Prefills, chunks and decodes over pools with gaps, written by forward and by write_kv; gaps keep their bytes."""
    queries, contexts = LENGTHS[phase]
    case = Case(
        query_lens=queries, context_lens=contexts, block_size=block_size, head_size=16, head_size_v=size_v,
        dtype=dtypes[0], kv_cache_dtype=dtypes[1], seed=seed,
    )  # fmt: skip
    backend = load(case, form, layout)

    ran = check(backend, materialize(case), host_writes=host_writes)

    assert untouched(ran.call.cache)


@given(st.sampled_from(FORMS), st.sampled_from(FORMS), st.sampled_from(["NHD", "HND"]), st.sampled_from(["NHD", "HND"]))
def test_what_was_not_agreed_on_is_refused_before_a_write(agreed, given_form, layout, given_layout) -> None:
    case = Case(query_lens=(1, 5), context_lens=(9, 0), head_size=16)
    scene = materialize(case)
    backend, other = load(case, agreed, layout), load(case, given_form, given_layout)
    runner, call = SceneRunner(backend, scene), scene.paged(other)
    before = [memory.clone() for memory in call.cache.storages]

    if (agreed, layout) == (given_form, given_layout):
        runner.forward(call, runner.builder.build(call.batch))
        return
    with pytest.raises(CacheError, match="bind the memory with this layer's backend"):
        runner.forward(call, runner.builder.build(call.batch))

    assert all(torch.equal(memory, was) for memory, was in zip(call.cache.storages, before, strict=True))
    is_narrower = (agreed == "split" and given_form in ("joint", "interleaved")) or agreed == "independent"
    if not is_narrower or given_form == "packed" or layout != given_layout:
        with pytest.raises(CacheError, match=f"kv_cache_form='{given_form}'"):
            backend.bind_cache(call.cache.tensors)


def test_a_loaded_backend_knows_the_forms_of_its_variant() -> None:
    backend = load(Case(query_lens=(1,), context_lens=(4,)), "packed", "HND")
    assert backend.kv_cache_forms == ("joint", "split", "interleaved", "packed", "independent")


def test_without_a_request_the_first_declared_form_is_agreed_on() -> None:
    requirements = attnplug.Requirements(head_size=16, num_q_heads=2, num_kv_heads=1, dtype="float32")
    backend = attnplug.load(requirements, "cpu", backend="torch/sdpa")
    assert backend.agreement.kv_cache_form == "joint"
    pool = torch.zeros(2, 4, backend.agreement.block_size, 1, 16)
    assert backend.bind_cache(split_kv(pool, "joint", "NHD", 16)).num_blocks == 4
