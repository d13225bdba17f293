"""What a plugin's kernels may get wrong in silence, whichever plugin: held against the oracle, on a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from attnplug.contract import Limits
from attnplug_kit.oracle import RunResult, check, materialize
from attnplug_kit.oracle.running import compare, run
from tests.backends.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import Backend
    from attnplug_kit.oracle import Case

    Load = Callable[..., Backend]


def check_the_lse_of_a_single_key(load: Load, variant: str, layer: Case) -> None:
    """See that it is the key's score: the natural logarithm, before any rounding of a sum."""
    scene = materialize(evolve(layer, query_lens=(1, 1), context_lens=(0, 0)))
    group = layer.num_q_heads // layer.num_kv_heads
    ran = run(load(scene.case.requirements(return_lse=True), variant), scene)
    scores = torch.stack(
        [
            (query[0].double() * key[0].double().repeat_interleave(group, 0)).sum(-1) * scene.scale
            for query, key in zip(scene.queries, scene.keys, strict=True)
        ]
    )

    torch.testing.assert_close(ran.lse.cpu().double(), scores, atol=2e-2, rtol=1e-2)


def check_a_cascade_and_the_flat_step(load: Load, variant: str, shared: Case) -> None:
    """Run a step with a shared prefix, and the same without saying so."""
    backend, scene = load(shared.requirements(return_lse=True), variant), materialize(shared)

    check(backend, scene)
    check(backend, evolve(scene, case=evolve(shared, common_prefix_len=0)))


def check_groups_that_share_a_state(load: Load, variant: str, layer: Case) -> None:
    """Build layers with different windows before either runs, as in models whose layers alternate."""
    scenes = [materialize(evolve(layer, sliding_window=window)) for window in (None, 9)]
    backends = [load(scene.case.requirements(return_lse=True), variant) for scene in scenes]
    state = backends[0].make_state(Limits(max_num_reqs=8, max_num_tokens=64, max_seq_len=512))
    calls = [scene.paged(backend, backend.device) for scene, backend in zip(scenes, backends, strict=True)]
    impls = [b.make_impl(s.layer(device=b.device)) for b, s in zip(backends, scenes, strict=True)]
    built = [
        backend.make_builder([impl], state).build(call.batch)
        for backend, impl, call in zip(backends, impls, calls, strict=True)
    ]
    for _ in range(2):
        for impl, call, metadata in zip(impls, calls, built, strict=True):
            impl.forward(call.query, call.key, call.value, call.cache, metadata, call.output, lse=call.lse)
    tokens, heads = layer.num_tokens, layer.num_q_heads
    for scene, backend, call in zip(scenes, backends, calls, strict=True):
        compare(RunResult(call, call.output[:tokens].view(tokens, heads, -1), call.lse[:tokens]), backend, scene)


def check_padded_requests_anywhere(load: Load, variant: str, layer: Case) -> None:
    """Let requests without tokens stand before, between and after others."""
    for query_lens in ((0, 1, 1), (1, 0, 1), (1, 0, 40), (1, 40, 0), (0, 40, 0)):
        context = tuple(17 if length else 0 for length in query_lens)
        case = evolve(layer, query_lens=query_lens, context_lens=context)
        check(load(case.requirements(return_lse=True), variant), materialize(case))


def check_dense_calls(load: Load, variant: str, layer: Case) -> None:
    """Attend whole keys, causally and not."""
    for attn_type, causal in (("decoder", True), ("encoder_only", False)):
        case = evolve(layer, query_lens=(40, 1, 300), context_lens=(0, 0, 0), attn_type=attn_type, causal=causal)
        check(load(case.requirements(paged=False, return_lse=True), variant), materialize(case))


def check_a_profiling_run(load: Load, variant: str, *, computes: bool, **asked: Any) -> None:
    """Run without metadata and cache, which succeeds; whether the output is written is said by each plugin."""
    setting = Setting(load, variant=variant, head_size=128, **asked)
    rows = [torch.randn(50, heads, 128, device=setting.backend.device).bfloat16() for heads in (4, 2, 2)]
    output = rows[0].new_zeros(50, 512)
    setting.impls[0].forward(*rows, None, None, output)

    assert bool(output.any()) is computes


def check_an_output_that_is_not_contiguous(load: Load, variant: str, **asked: Any) -> None:
    """Give output and LSE as columns of wider tensors: they are written, and nothing beside them."""
    setting = Setting(load, variant=variant, head_size=128, return_lse=True, **asked)
    metadata = setting.builder.build(setting.batch([1, 5], [9, 5]))
    rows = [torch.randn(6, heads, 128, device=setting.backend.device).bfloat16() for heads in (4, 2, 2)]
    wide, sums = rows[0].new_zeros(6, 1024), rows[0].new_zeros(6, 8, dtype=torch.float32)
    plain, plain_sums = wide[:, :512].clone(), sums[:, :4].clone()
    cache = setting.backend.make_cache(8)
    for output, lse in ((wide[:, :512], sums[:, :4]), (plain, plain_sums)):
        setting.impls[0].forward(*rows, cache, metadata, output, lse=lse)

    assert torch.equal(wide[:, :512], plain)
    assert torch.equal(sums[:, :4], plain_sums)
    assert not wide[:, 512:].any()
    assert not sums[:, 4:].any()
