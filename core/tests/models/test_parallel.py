"""Tensor parallelism of a layer, and the bytes of its KV cache, compared with the tensors of an actual cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import RequirementsError
from attnplug.models.parallel import cache_bytes, kept_tokens, shard
from attnplug.request.requirements import Requirements


def layer(**more) -> Requirements:
    fields = {"head_size": 64, "num_q_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16", "paged": True}
    return Requirements(**(fields | more))


@pytest.mark.parametrize(
    ("size", "heads", "sharing", "copies"),
    [
        (1, (32, 8), "whole", 1),
        (2, (16, 4), "split", 1),
        (8, (4, 1), "split", 1),
        (16, (2, 1), "replicated", 2),
        (32, (1, 1), "replicated", 4),
    ],
)
def test_heads_of_each_device(size: int, heads: tuple[int, int], sharing: str, copies: int) -> None:
    found = shard(layer(), size)

    assert (found.requirements.num_q_heads, found.requirements.num_kv_heads) == heads
    assert (found.sharing, found.copies) == (sharing, copies)


@pytest.mark.parametrize(("queries", "keys", "size"), [(32, 8, 3), (71, 1, 2), (28, 4, 8), (24, 6, 4)])
def test_a_size_that_does_not_divide_the_heads_is_refused(queries: int, keys: int, size: int) -> None:
    with pytest.raises(
        RequirementsError, match=f"over {size} devices was requested for {queries} query heads"
    ) as caught:
        shard(layer(num_q_heads=queries, num_kv_heads=keys), size)

    offered = [int(word) for word in caught.value.fix.removeprefix("request ").removesuffix(" devices").split(", ")]
    assert offered[0] == 1
    assert size not in offered
    for each in offered:
        shard(layer(num_q_heads=queries, num_kv_heads=keys), each)


@pytest.mark.parametrize("size", [0, -1, "2", True, 2.0])
def test_a_size_is_a_whole_number(size) -> None:
    with pytest.raises(RequirementsError, match="a whole number, at least 1"):
        shard(layer(), size)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 24))
def test_every_head_is_on_a_device(keys: int, group: int, size: int) -> None:
    wanted = layer(num_q_heads=keys * group, num_kv_heads=keys)
    try:
        found = shard(wanted, size)
    except RequirementsError:
        assert keys * group % size or (keys % size and size % keys)
        return
    own = found.requirements
    assert own.num_q_heads * size == wanted.num_q_heads
    assert own.num_kv_heads * size == wanted.num_kv_heads * found.copies
    # The query heads of a device are of the KV heads that it has: no group is torn.
    assert (own.num_q_heads <= group) if found.copies > 1 else own.gqa_ratio == group


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_bytes_are_those_of_tensors(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    names = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
    wanted = layer(kv_cache_dtype=dtype, head_size_v=48)
    slot = [torch.empty(1, 8, size, dtype=getattr(torch, names.get(dtype, dtype))) for size in (64, 48)]

    assert cache_bytes(wanted) == sum(each.nbytes for each in slot)


def test_values_of_latents_are_parts_of_their_keys() -> None:
    latent = layer(latent=True, head_size=576, head_size_v=512, num_q_heads=128, num_kv_heads=1)

    assert cache_bytes(latent) == 1152  # as published
    assert cache_bytes(latent.evolve(kv_cache_dtype="fp8_e4m3")) == 576
    assert cache_bytes(latent.evolve(kv_cache_dtype="fp8_ds_mla")) == 656
    for size in (2, 8, 128):  # the latents are on every device
        found = shard(latent, size)
        assert (found.requirements.num_q_heads, found.requirements.num_kv_heads) == (128 // size, 1)
        assert (found.sharing, found.copies, cache_bytes(found.requirements)) == ("replicated", size, 1152)


def test_what_has_no_cache_has_no_bytes() -> None:
    assert cache_bytes(layer(paged=False)) == 0
    assert cache_bytes(layer(kv_sharing=True)) == 0
    assert cache_bytes(layer(attn_type="encoder", paged=False)) == 0


def test_sizes_of_packed_and_unknown_dtypes() -> None:
    assert cache_bytes(layer(kv_cache_dtype="int4")) == 512
    for dtype in ("int8_per_token_head", "fp8_per_token_head"):  # with two float32 scales
        assert cache_bytes(layer(kv_cache_dtype=dtype)) == 8 * (2 * 64 + 8)
    assert cache_bytes(layer(kv_cache_dtype="int8_k")) is None
    assert cache_bytes(layer(kv_cache_dtype="acme.packed")) is None


def test_tokens_that_a_layer_can_read() -> None:
    assert kept_tokens(layer()) is None
    assert kept_tokens(layer(sliding_window=128)) == 128
    assert kept_tokens(layer(attention_chunk=8192)) == 8192
    assert kept_tokens(layer(sliding_window=128, attention_chunk=64)) == 64
