"""Multi-head latent attention: absorbed steps over a pool of latents, and the other form of their layers."""

from __future__ import annotations

from types import SimpleNamespace as Names
from typing import Any

import pytest
import torch

from attnplug.errors import NoBackendError, NotNegotiatedError
from attnplug_kit.oracle import attend
from attnplug_sglang import latent
from hosts.sglang.tests.rig import ForwardContext, ForwardMode, RadixAttention, World, forward_context, worst

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
CLOSE = 1e-5
FP8 = torch.float8_e4m3fn
RANK, ROPE, NOPE, VALUE, HEADS = 32, 8, 16, 12, 4
SCALE = (NOPE + ROPE) ** -0.5
SIZES = {"latent": True, "heads": HEADS, "kv_heads": 1, "size": RANK + ROPE, "size_v": RANK, "scaling": SCALE}


def world_of(page: int = 1, **options: Any) -> World:
    """Return two layers of latents, each with its form of keys and values per head."""
    world = World(page, (-1, -1), **SIZES, **options)
    for index, block in enumerate(world.layers):
        block.attn_mha = RadixAttention(HEADS, NOPE + ROPE, SCALE, HEADS, index, v_head_dim=VALUE)
    return world


@pytest.mark.parametrize("page", [1, 64])
def test_absorbed_steps(page: int) -> None:
    world = world_of(page)
    backend = world.backend()
    a, b = world.new(), world.new()
    assert world.step(backend, [a, b], [17, 70], EXTEND) < CLOSE
    c = world.fork(b, 64)
    assert world.step(backend, [c, a, b], [9, 21, 1], MIXED) < CLOSE
    assert world.step(backend, [b, c, a], [1, 1, 1], DECODE) < CLOSE
    step, data = world.batch([a], [1], DECODE), world.qkv(1)
    backend.init_forward_metadata(step)
    found = world.run(backend, step, data)
    world.layers[0].attn.scaling = (RANK + ROPE) ** -0.5  # the scale matters
    assert worst(found, world.expected([a], [1], data)) > CLOSE


@pytest.mark.parametrize("page", [1, 64])
def test_decodes_in_graphs(page: int) -> None:
    world = world_of(page)
    backend = world.backend()
    backend.init_cuda_graph_state(2, 2)
    a, b = world.new(), world.new()
    assert world.step(backend, [a, b], [17, 70], EXTEND) < CLOSE
    backend.init_forward_metadata_out_graph(world.batch([], [], DECODE, pad=2), in_capture=True)
    captured = backend.forward_metadata
    for requests in ([a, b], [b], [b, a]):
        padding = 2 - len(requests)
        step, data = world.batch(requests, [1] * len(requests), DECODE, pad=padding), world.qkv(2)
        backend.init_forward_metadata_out_graph(step)
        backend.forward_metadata = captured
        backend.init_forward_metadata_in_graph(step)
        found = world.run(backend, step, data)
        real = [tuple(each[: len(requests)] for each in layer) for layer in data]
        assert worst(found, world.expected(requests, [1] * len(requests), real)) < CLOSE


def test_drafts_are_verified_absorbed() -> None:
    world = world_of(64)
    backend = world.backend()
    a, b = world.new(), world.new()
    assert world.step(backend, [a, b], [17, 70], EXTEND) < CLOSE
    chain = Names(custom_mask=None, draft_token_num=3)
    assert world.step(backend, [b, a], [3, 3], ForwardMode.TARGET_VERIFY, spec=chain) < CLOSE


def test_rotary_parts_that_come_apart() -> None:
    world = world_of()
    backend = world.backend()
    a = world.new()
    step, data = world.batch([a], [5], EXTEND), world.qkv(5)
    backend.init_forward_metadata(step)
    found = []
    for block, (q, k, v) in zip(world.layers, data, strict=True):
        apart = {"q_rope": q[..., RANK:], "k_rope": k[..., RANK:]}
        found.append(backend.forward(q[..., :RANK], v, v, block.attn, step, **apart))
    assert worst(found, world.expected([a], [5], data)) < CLOSE
    assert world.step(backend, [a], [1], DECODE) < CLOSE


@pytest.mark.parametrize("name", ["topk_indices", "cos_sin_cache"])
def test_other_arguments_are_refused(name: str) -> None:
    world = world_of()
    backend = world.backend()
    step, ((q, k, v), _) = world.batch([world.new()], [5], EXTEND), world.qkv(5)
    backend.init_forward_metadata(step)
    with pytest.raises(NotNegotiatedError, match=f"called with {name}"):
        backend.forward(q, k, v, world.layers[0].attn, step, **{name: q})
    assert not world.pool.kv_buffer[0].any()


@pytest.mark.parametrize("scale", [None, 0.3])
def test_fp8_pools(scale: float | None) -> None:
    world = world_of(64, kv_dtype=FP8, scales=None if scale is None else (scale, scale))
    backend = world.backend()
    a = world.new()
    used = scale or 1.0
    for lens, mode in (([17], EXTEND), ([1], DECODE)):
        step, data = world.batch([a], lens, mode), world.qkv(sum(lens))
        backend.init_forward_metadata(step)
        found = world.run(backend, step, data)
        kept = [(q, k, k[..., :RANK]) for q, k in ((q, (k / used).to(FP8).float() * used) for q, k, _ in data)]
        assert worst(found, world.expected([a], lens, kept)) < 1e-4
    (served,) = {latent._served[block.attn_mha].serves(in_parts=False) for block in world.layers}
    assert served is (scale is None)  # models write latents without a scale


def test_a_layer_without_latents_beside_them() -> None:
    world = world_of()
    world.layers[1].attn = RadixAttention(HEADS, 16, 0.25, HEADS, 7)
    with pytest.raises(NotNegotiatedError, match="has no latents of 32 \\+ 8 elements"):
        world.backend()


def test_a_backend_without_latents_is_refused_at_the_start() -> None:
    with pytest.raises(NoBackendError, match="latent"):
        world_of(16, backend="flash_attn/fa2").backend()


# Keys and values per head


def expand(index: int, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's keys and values per head of latents, as `kv_b_proj` makes them."""
    weights = torch.randn(RANK, HEADS, NOPE + VALUE, generator=torch.Generator().manual_seed(index)).to(latents) / 4
    both = torch.einsum("tl,lhd->thd", latents[:, 0, :RANK], weights)
    rope = latents[..., RANK:].expand(-1, HEADS, -1)
    return torch.cat([both[..., :NOPE], rope], -1), both[..., NOPE:].contiguous()


def extend(world: World, backend: Any, requests: list[int], lens: list[int], chunk: int | None, padding: int) -> float:
    """Run an extend as SGLang's models do in the other form, with `chunk` or all tokens of the prefix in a call."""
    step, data = world.batch(requests, lens, EXTEND), world.qkv(sum(lens))
    before = [world.requests[each]["length"] for each in requests]
    backend.init_forward_metadata(step)
    step.mha_one_shot, step.mha_return_lse = chunk is None, chunk is not None
    world.expected(requests, lens, data)  # takes latents over
    largest = 0.0
    for index, block in enumerate(world.layers):
        world.pool.kv_buffer[index][step.out_cache_loc] = data[index][1]  # which models do in this form
        queries = world.randn(sum(lens) + padding, HEADS, NOPE + ROPE)
        made = [expand(index, world.requests[each]["kv"][index][0].float()) for each in requests]
        with forward_context(ForwardContext(attn_backend=backend)):
            if chunk is None:
                output = call(block, step, queries, made, [slice(None)] * len(requests)).view(-1, HEADS, VALUE)
            else:
                output = in_chunks(block, step, queries, made, before, chunk)
        assert not output[sum(lens) :].any()
        starts = [sum(lens[:i]) for i in range(len(lens))]
        for (k, v), start, count in zip(made, starts, lens, strict=True):
            rows = slice(start, start + count)
            wanted = attend(queries[rows].double(), k.double(), v.double(), scale=SCALE, causal=True).output
            largest = max(largest, float((output[rows].double() - wanted).abs().max()))
    return largest


def call(block: Any, step: Any, queries: torch.Tensor, made: Any, parts: list[slice]) -> Any:
    """Call the form of a layer with parts of the keys and values of each request."""
    k, v = (torch.cat([each[i][part] for each, part in zip(made, parts, strict=True)]) for i in (0, 1))
    return block.attn_mha(queries.flatten(1), k, v, step, save_kv_cache=False)


def in_chunks(block: Any, step: Any, queries: torch.Tensor, made: Any, before: list[int], chunk: int) -> torch.Tensor:
    """Merge the attention of new tokens to each other, and to chunks of their prefixes, as SGLang's models do."""
    step.attn_attend_prefix_cache = False
    output, lse = call(block, step, queries, made, [slice(length, None) for length in before])
    step.attn_attend_prefix_cache = True
    starts = range(0, max(before), chunk)
    counts = [[min(max(length - start, 0), chunk) for length in before] for start in starts]
    step.prefix_chunk_seq_lens_cpu = torch.tensor(counts)
    for step.prefix_chunk_idx, start in enumerate(starts):
        parts = [slice(start, min(length, start + chunk)) for length in before]
        part, part_lse = call(block, step, queries, made, parts)
        both = torch.logaddexp(lse, part_lse)
        output = output * (lse - both).exp()[..., None] + part * (part_lse - both).exp()[..., None]
        lse = both
    return output


@pytest.mark.parametrize("chunk", [None, 16])
def test_extends_with_keys_and_values_per_head(chunk: int | None) -> None:
    world = world_of(64)
    backend = world.backend()
    a, b, c = world.new(), world.new(), world.new()
    assert extend(world, backend, [a, b], [17, 40], None, padding=0) < CLOSE
    assert extend(world, backend, [a, b, c], [5, 21, 9], chunk, padding=0) < CLOSE
    assert extend(world, backend, [c], [5], chunk, padding=3) < CLOSE
    # Both forms have one KV cache.
    assert world.step(backend, [a, b, c], [1, 1, 1], DECODE) < CLOSE
    assert world.step(backend, [a, b], [7, 1], MIXED) < CLOSE
    assert "prefills with keys and values per head: torch/sdpa" in backend.explain()


def test_rows_of_a_step_without_requests_are_zeros() -> None:
    world = world_of()
    backend = world.backend()
    step, queries = world.batch([], [], EXTEND), world.randn(2, HEADS, NOPE + ROPE)
    backend.init_forward_metadata(step)
    keys, values = world.randn(2, HEADS, NOPE + ROPE), world.randn(2, HEADS, VALUE)
    module = world.layers[0].attn_mha
    for step.mha_return_lse in (False, True):
        found = backend.forward_extend(queries, keys, values, module, step, save_kv_cache=False)
        output, lse = found if step.mha_return_lse else (found, torch.zeros(2, HEADS))
        assert (output.numel(), lse.shape) == (2 * HEADS * VALUE, (2, HEADS))
        assert not output.any()
        assert not lse.any()


def test_all_steps_are_absorbed_where_nothing_serves_dense_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NoBackendError("no backend serves it", "", "")

    world = world_of()
    backend = world.backend()
    assert "all are absorbed" not in backend.explain()
    monkeypatch.setattr(latent.attnplug, "select", refuse)
    absorbed = world_of()
    backend = absorbed.backend()
    assert "prefills with keys and values per head: none, all are absorbed" in backend.explain()
    assert absorbed.step(backend, [absorbed.new()], [5], EXTEND) < CLOSE


@pytest.mark.parametrize(
    ("wanted", "prefix", "merges", "found"),
    [
        ("MHA_ONE_SHOT", 0, False, "MHA_ONE_SHOT"),
        ("MHA_ONE_SHOT", 9, False, "MHA_ONE_SHOT"),
        ("MHA_CHUNKED_KV", 0, False, "MHA_CHUNKED_KV"),
        ("MHA_CHUNKED_KV", 9, False, "MLA"),
        ("MHA_CHUNKED_KV", 9, True, "MHA_CHUNKED_KV"),
        ("MLA", 9, True, "MLA"),
    ],
)
def test_the_form_of_a_step(
    monkeypatch: pytest.MonkeyPatch, wanted: str, prefix: int, merges: bool, found: str
) -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers  # noqa: PLC0415 - after the rig

    methods = handlers.AttnForwardMethod
    world = world_of()
    _backend = world.backend()
    attn = world.layers[0]
    latent._served[attn.attn_mha].merges = merges
    monkeypatch.setattr(handlers, "handle_attention_fa3", lambda *_: methods[wanted])
    step = Names(extend_prefix_lens_cpu=[0, prefix])
    assert latent.method_of(attn, step) is methods[found]
    del latent._served[attn.attn_mha]  # as where nothing serves dense calls
    assert latent.method_of(attn, step) is methods.MLA


def test_models_ask_for_the_form_by_the_name_of_the_backend() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry  # noqa: PLC0415

    latent.register_handler("attnplug:acme/host")
    assert AttentionBackendRegistry.get_handler("attnplug:acme/host") is latent.method_of
