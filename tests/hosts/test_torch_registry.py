"""torch's registry of flash attention on the dense op: `scaled_dot_product_attention` and `varlen_attn`."""

from __future__ import annotations

from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attnplug
from attnplug.errors import CacheError, NoBackendError
from attnplug.torch_backend.impl import TorchImpl
from attnplug_kit.oracle import attend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(nn.attention, "activate_flash_attention_impl"),
        reason="this torch has no registry of flash attention",
    ),
    pytest.mark.filterwarnings("ignore:.*[Oo]verrid.*:UserWarning"),  # replacing an operator is what is tested
]


@pytest.fixture
def active(monkeypatch):
    """Activate the adapter; return the runs of the built-in backend."""
    name, runs, run = import_module("tests.hosts.torch_registry").NAME, [], TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *arguments: (runs.append(self), run(self, *arguments))[1])
    nn.attention.activate_flash_attention_impl(name)
    yield runs
    if nn.attention.current_flash_attention_impl() is not None:
        nn.attention.restore_flash_attention_impl()


def by_oracle(query, key, value, **features):
    """Return the oracle's output of ``(batch, heads, tokens, size)``."""
    scale = features.pop("scale", query.shape[-1] ** -0.5)
    sequences = zip(*(one.detach().transpose(1, 2).double() for one in (query, key, value)), strict=True)
    return torch.stack([attend(*one, scale=scale, **features).output for one in sequences]).transpose(1, 2)


CALLS = {
    "plain": ((2, 4, 33, 64), (2, 4, 20, 64), {}),
    "causal": ((2, 4, 33, 64), (2, 4, 33, 64), {"is_causal": True}),
    "scale": ((2, 4, 33, 64), (2, 4, 33, 64), {"scale": 0.3}),
}


@pytest.mark.parametrize(("queries", "keys", "arguments"), CALLS.values(), ids=CALLS)
def test_torchs_function_runs_through_attnplug(queries, keys, arguments, active) -> None:
    query, key, value = torch.randn(queries), torch.randn(keys), torch.randn(keys)
    features = {"causal": arguments.get("is_causal", False)}
    features |= {name: one for name, one in arguments.items() if name == "scale"}

    found = sdpa(query, key, value, **arguments)

    assert len(active) == 1
    torch.testing.assert_close(found.double(), by_oracle(query, key, value, **features), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mask", [torch.rand(2, 1, 33, 20) > 0.3, torch.randn(1, 4, 33, 20)], ids=["boolean", "additive"]
)
def test_masks_run_through_attnplug(mask, active) -> None:
    query, key, value = torch.randn(2, 4, 33, 64), torch.randn(2, 4, 20, 64), torch.randn(2, 4, 20, 64)

    found = sdpa(query, key, value, attn_mask=mask)
    count = len(active)
    nn.attention.restore_flash_attention_impl()

    assert count == 1
    torch.testing.assert_close(found, sdpa(query, key, value, attn_mask=mask), rtol=1e-5, atol=1e-5)


def test_causal_queries_begin_with_the_first_key(active) -> None:
    query, key, value = torch.randn(2, 4, 5, 64), torch.randn(2, 4, 9, 64), torch.randn(2, 4, 9, 64)

    found, fewer = sdpa(query, key, value, is_causal=True), sdpa(key, query, query, is_causal=True)
    count = len(active)
    nn.attention.restore_flash_attention_impl()

    assert count == 1  # more queries than keys are left to torch
    torch.testing.assert_close(found, sdpa(query, key, value, is_causal=True))
    torch.testing.assert_close(fewer, sdpa(key, query, query, is_causal=True))


def test_the_backward_is_torchs_own(active) -> None:
    given = [torch.randn(2, 4, 33, 64, requires_grad=True) for _ in range(3)]

    sdpa(*given, is_causal=True).square().sum().backward()
    found = [one.grad for one in given]
    nn.attention.restore_flash_attention_impl()
    for one in given:
        one.grad = None
    sdpa(*given, is_causal=True).square().sum().backward()

    assert len(active) == 1
    for grad, one in zip(found, given, strict=True):
        torch.testing.assert_close(grad, one.grad, rtol=1e-4, atol=1e-4)


def test_the_scope_is_followed(active) -> None:
    query = torch.randn(1, 2, 8, 64)

    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):
        sdpa(query, query, query)
    with attnplug.using(backend="torch"):
        sdpa(query, query, query)

    assert len(active) == 1


def test_what_is_restored_is_torchs_own(active) -> None:
    query = torch.randn(1, 2, 8, 64)
    sdpa(query, query, query)

    nn.attention.restore_flash_attention_impl()
    sdpa(query, query, query)

    assert nn.attention.current_flash_attention_impl() is None
    assert len(active) == 1


@pytest.mark.parametrize(
    ("window", "features"),
    [
        ((-1, -1), {"causal": False}),
        ((-1, 0), {"causal": True}),
        ((3, 0), {"causal": True, "window": (3, 0)}),
    ],
)
def test_packed_sequences_run_through_attnplug(window, features, active) -> None:
    query, key, value = torch.randn(12, 4, 64), torch.randn(20, 4, 64), torch.randn(20, 4, 64)
    starts = torch.tensor([0, 5, 12], dtype=torch.int32), torch.tensor([0, 9, 20], dtype=torch.int32)

    found = import_module("torch.nn.attention.varlen").varlen_attn(
        query, key, value, *starts, 7, 11, window_size=window
    )
    parts = zip(pairwise(starts[0].tolist()), pairwise(starts[1].tolist()), strict=True)
    wanted = [attend(query[a:b], key[c:d], value[c:d], scale=64**-0.5, **features).output for (a, b), (c, d) in parts]

    assert len(active) == 1
    torch.testing.assert_close(found.double(), torch.cat(wanted), rtol=1e-5, atol=1e-5)


BLOCKS = torch.tensor([[3, 5], [7, 2], [4, 8]], dtype=torch.int32)
STARTS, USED = torch.tensor([0, 5, 6, 13], dtype=torch.int32), torch.tensor([9, 31, 20], dtype=torch.int32)


def pages(kv_heads=4, size_v=64, dtype=torch.float32):
    """Return a query of three sequences, and a KV cache whose rows beyond them are not numbers."""
    query = torch.randn(13, 4, 64, dtype=dtype)
    pools = [torch.randn(9, 16, kv_heads, size, dtype=dtype) for size in (64, size_v)]
    used = torch.zeros(9, 16, dtype=torch.bool)
    for row, length in zip(BLOCKS.tolist(), USED.tolist(), strict=True):
        for position in range(length):
            used[row[position // 16], position % 16] = True
    for pool in pools:
        pool[~used] = torch.nan
    return query, *pools


def paged_by_oracle(query, keys, values, **features):
    """Return the oracle's results of the sequences, one after another, as output and LSE."""
    results = []
    for row, length, (first, last) in zip(BLOCKS.tolist(), USED.tolist(), pairwise(STARTS.tolist()), strict=True):
        key, value = (pool[row].flatten(0, 1)[:length].double() for pool in (keys, values))
        results.append(attend(query[first:last].double(), key, value, **{"scale": 64**-0.5, **features}))
    return torch.cat([one.output for one in results]), torch.cat([one.lse for one in results])


def by_pages(query, keys, values, **arguments):
    given = {"seqused_k": USED, "block_table": BLOCKS, "window_size": (-1, 0), "enable_gqa": True, **arguments}
    return import_module("torch.nn.attention.varlen").varlen_attn(query, keys, values, STARTS, None, 7, 31, **given)


PAGED = {
    "causal": ({}, {}, {"causal": True}),
    "not causal": ({}, {"window_size": (-1, -1)}, {"causal": False}),
    "window": ({}, {"window_size": (6, 0)}, {"causal": True, "window": (6, 0)}),
    "scale": ({}, {"scale": 0.3}, {"causal": True, "scale": 0.3}),
    "grouped heads": ({"kv_heads": 2}, {}, {"causal": True}),
    "one split": ({}, {"num_splits": 1}, {"causal": True}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}, {"causal": True}),
}


@pytest.mark.parametrize(("shapes", "arguments", "features"), PAGED.values(), ids=PAGED)
def test_a_kv_cache_of_two_tensors_is_read_in_place(shapes, arguments, features, active) -> None:
    varlen = import_module("torch.nn.attention.varlen")
    query, keys, values = pages(**shapes)
    before = keys.clone(), values.clone()

    output, lse = by_pages(query, keys, values, return_aux=varlen.AuxRequest(lse=True), **arguments)

    wanted_output, wanted_lse = paged_by_oracle(query, keys, values, **features)
    tolerance = 2e-2 if query.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(output.double(), wanted_output, rtol=tolerance, atol=tolerance)
    tolerance = 1e-3 if query.dtype == torch.bfloat16 else 1e-5  # absolute too: the logarithm of a sum near 1 is near 0
    torch.testing.assert_close(lse.T.double(), wanted_lse, rtol=tolerance, atol=tolerance)
    assert len(active) == 1
    for pool, former in zip((keys, values), before, strict=True):
        torch.testing.assert_close(pool, former, rtol=0, atol=0, equal_nan=True)


def test_pages_are_read_with_no_lengths_on_the_cpu(active) -> None:
    query, keys, values = pages()

    by_pages(query, keys, values)

    agreement = active[0].backend.agreement
    requested = agreement.requirements
    assert (requested.seq_lens_cpu_kind, requested.query_lens_cpu_kind) == ("absent", "absent")
    assert agreement.reads_lengths
    assert (agreement.kv_cache_form, agreement.kv_layout, requested.kv_in_cache) == ("split", "NHD", True)


def test_pages_between_those_of_other_layers_are_read(active) -> None:
    query, *pools = pages()
    pool = torch.full((9, 3, 2, 16, 4, 64), torch.nan)
    pool[:, 1, 0], pool[:, 1, 1] = pools

    output = by_pages(query, *pool[:, 1].unbind(1))

    torch.testing.assert_close(output, by_pages(query, *pools), rtol=0, atol=0)
    assert not output.isnan().any()


def test_pools_may_have_separate_strides(active) -> None:
    query, keys, values = pages()
    spaced = torch.full((9, 2, 16, 4, 64), torch.nan)
    spaced[:, 1] = keys

    output = by_pages(query, spaced[:, 1], values)

    torch.testing.assert_close(output, by_pages(query, keys, values), rtol=0, atol=0)
    assert [one.backend.agreement.kv_cache_form for one in active] == ["independent", "split"]


def test_pages_are_served_as_the_scope_says(active) -> None:
    given = pages()

    by_pages(*given)
    with attnplug.using(backend="flashinfer"), pytest.raises(NoBackendError):
        by_pages(*given)
    with attnplug.using(backend="torch"):
        by_pages(*given)

    assert len(active) == 2


def test_layers_of_one_request_share_an_implementation(active) -> None:
    for _ in range(3):
        by_pages(*pages())

    assert len(active) == 3
    assert len({id(one) for one in active}) == 1


def test_a_sequence_may_be_in_block_0(active) -> None:
    """The pools of torch have no null block; where nothing is written, block 0 is a block like others."""
    query, *pools = pages()
    moved = [pool.roll(-2, 0) for pool in pools]

    output = by_pages(query, *moved, block_table=BLOCKS - 2)

    assert int((BLOCKS - 2).min()) == 0
    torch.testing.assert_close(output, by_pages(query, *pools), rtol=0, atol=0)


def test_blocks_beyond_the_pool_are_refused(active) -> None:
    for block_table, said in ((BLOCKS - 3, "block -1"), (BLOCKS + 1, "a cache of 9 blocks")):
        with pytest.raises(CacheError, match=said):
            by_pages(*pages(), block_table=block_table)

    assert not active


def test_packed_sequences_end_with_a_restoration(active) -> None:
    query, starts = torch.randn(12, 4, 64), torch.tensor([0, 5, 12], dtype=torch.int32)
    nn.attention.restore_flash_attention_impl()

    # The CPU has no such operator: NotImplementedError, unless a fake of other tests has registered one, which refuses.
    with pytest.raises(RuntimeError):
        import_module("torch.nn.attention.varlen").varlen_attn(query, query, query, starts, starts, 7, 7)
    assert not active
