"""Runs a scene through a backend, and compares what comes out with the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract import Limits
from attnplug_kit.oracle.closeness import assert_close
from attnplug_kit.oracle.scene import CANARY, Dense, Paged

if TYPE_CHECKING:
    from attnplug.contract import AttentionImpl, Backend, Cache
    from attnplug_kit.oracle.scene import Scene


@frozen(eq=False)
class RunResult:
    """
    A call and its results.

    Attributes:
        call: The arguments; output, LSE and cache as the call left them.
        output: ``(tokens, num_q_heads, head_size_v)``, padding left out.
        lse: ``(tokens, num_q_heads)``, padding left out; CANARY where LSE was not negotiated.
    """

    call: Dense | Paged
    output: Tensor
    lse: Tensor


def limits_of(scene: Scene) -> Limits:
    """Return the tightest limits that hold the scene."""
    case = scene.case
    return Limits(
        max_num_reqs=len(case.query_lens),
        max_num_tokens=case.num_tokens + case.num_padding_tokens,
        max_seq_len=max(1, *case.seq_lens, *case.key_lens),
        num_blocks=max(2, scene.num_blocks),
    )


def run(backend: Backend, scene: Scene, *, host_writes: bool = False) -> RunResult:
    """
    Build and run one step, paged or dense, as the backend's agreement says.

    Args:
        backend: Loaded for the requirements of the scene's case.
        scene: The scene.
        host_writes: Whether the new K/V go into the cache through `write_kv`, apart from forward.
    """
    device = backend.device
    writer, scales = "host" if host_writes else None, backend.impl_class.static_scales
    layer = scene.layer(device=device, cache_write=writer, scales=scales)
    impl = backend.make_impl(layer)
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    asked = backend.agreement.requirements
    call: Dense | Paged = scene.paged(backend, device) if asked.paged else scene.dense(device)
    cache = call.cache if isinstance(call, Paged) else None
    if impl.host_writes and cache is not None:
        _write(impl, call, cache)
    lse = call.lse if asked.return_lse else None
    impl.forward(call.query, call.key, call.value, cache, builder.build(call.batch), call.output, lse=lse)
    tokens, heads = scene.case.num_tokens, scene.case.num_q_heads
    return RunResult(call, call.output[:tokens].view(tokens, heads, -1), call.lse[:tokens])


def _write(impl: AttentionImpl, call: Dense | Paged, cache: Cache) -> None:
    """Write what is new, as a host does that writes the cache itself."""
    slots = call.batch.slot_mapping
    if call.key is not None and call.value is not None and slots is not None:
        impl.write_kv(call.key, call.value, cache, slots)


def check(backend: Backend, scene: Scene, *, host_writes: bool = False) -> RunResult:
    """
    Run a scene and assert that output and LSE are the oracle's, and that padding is untouched. Arguments as for `run`.

    Raises:
        AssertionError: They are not.
    """
    ran, case = run(backend, scene, host_writes=host_writes), scene.case
    compare(ran, backend, scene)
    for name, rows in (("output", ran.call.output[case.num_tokens :]), ("lse", ran.call.lse[case.num_tokens :])):
        if not torch.equal(rows, torch.full_like(rows, CANARY)):
            raise AssertionError(f"{name}: rows beyond the batch's {case.num_tokens} tokens were written")
    return ran


def compare(ran: RunResult, backend: Backend, scene: Scene) -> None:
    """
    Assert that output and LSE are the oracle's.

    Raises:
        AssertionError: They are not.
    """
    exact, dtype, scaled = scene.expected(), ran.output.dtype, scene.rounding is not None
    assert_close(
        ran.output,
        exact.output,
        dtype=dtype,
        scale=scene.largest_value,
        scaled_keys=scaled,
        byte_weights=scene.has_byte_weights,
    )
    if backend.agreement.requirements.return_lse:
        wanted = exact.lse_with_sink if backend.impl_class.lse_includes_sink else exact.lse
        assert_close(ran.lse, wanted, dtype=dtype, what="lse", scaled_keys=scaled)
