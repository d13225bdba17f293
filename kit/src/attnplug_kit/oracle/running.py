"""Runs scenes through a backend, step by step or as replays of a graph, and compares the results with the oracle's."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug.contract import Limits
from attnplug_kit.oracle.closeness import DifferenceError, assert_close, assert_output
from attnplug_kit.oracle.exercised import passed
from attnplug_kit.oracle.padding import NO_BLOCK
from attnplug_kit.oracle.scene import CANARY, Dense, Paged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract import Captures, KVCache, Layer, LoadedBackend, Metadata
    from attnplug_kit.oracle.case import Case
    from attnplug_kit.oracle.scene import Scene

_LIMITS: Final = Limits(max_num_reqs=16, max_num_tokens=1024, max_seq_len=1024)


@frozen(eq=False)
class RunResult:
    """
    A call and its results.

    Attributes:
        call: The arguments; output, LSE and cache as the call left them.
        output: ``(tokens, num_q_heads, head_size_v)``, without padding.
        lse: ``(tokens, num_q_heads)``, without padding; CANARY where LSE was not negotiated.
    """

    call: Dense | Paged
    output: Tensor
    lse: Tensor


class SceneRunner:
    """
    A layer with its builder and state, which runs the steps of scenes.

    Args:
        backend: Loaded for the requirements of the scenes.
        scene: A scene of the layer.
        layer: The layer; None for the scene's.
        host_writes: Whether new K/V go into the cache by `write_kv`, before `forward`.
        limits: The limits of the steps.
        state: A state to share; None makes one with these limits.
    """

    def __init__(
        self,
        backend: LoadedBackend,
        scene: Scene,
        *,
        layer: Layer | None = None,
        host_writes: bool = False,
        limits: Limits = _LIMITS,
        state: Captures | None = None,
    ) -> None:
        self.backend = backend
        writer, scales = "host" if host_writes else None, backend.impl_class.static_scales
        self.impl = backend.make_impl(layer or scene.layer(device=backend.device, cache_write=writer, scales=scales))
        self.state = state or backend.make_state(limits)
        self.builder = backend.make_builder([self.impl], self.state)

    def call(self, scene: Scene) -> Dense | Paged:
        """Return the arguments of one step, paged or dense, as the backend's agreement says."""
        device = self.backend.device
        is_paged = self.backend.agreement.requirements.paged
        return scene.paged(self.backend, device) if is_paged else scene.dense(device)

    def forward(self, call: Dense | Paged, metadata: Metadata, *, sinks: Tensor | None = None) -> None:
        """Run a step that was built; `sinks` as of `Attention.forward`."""
        cache = call.cache if isinstance(call, Paged) else None
        slots = call.batch.slot_mapping
        if self.impl.host_writes and cache is not None and call.key is not None:  # None: shared K/V are cached already
            first = metadata.num_decode_tokens if self._writes_prefills_alone else 0
            value = None if call.value is None else call.value[first:]
            self.impl.write_kv(call.key[first:], value, cache, slots[first:])  # type: ignore[index]
        lse = call.lse if self.backend.agreement.requirements.return_lse else None
        try:
            rows = (call.query, call.key, call.value)
            self.impl.forward(*rows, cache, metadata, call.output, lse=lse, sinks=sinks, **call.selection)
        except (AttributeError, IndexError, RuntimeError, TypeError) as error:
            note = _note_of(error, cache)
            if not note:
                raise
            raise AssertionError(f"forward raised {error!r}: {note}") from error

    @property
    def _writes_prefills_alone(self) -> bool:
        return bool(self.impl.forward_writes) and self.impl.host_writes == {"prefill"}

    def result(self, call: Dense | Paged, scene: Scene) -> RunResult:
        """Return the results of a step that ran."""
        tokens, heads = scene.case.num_tokens, scene.case.num_q_heads
        return RunResult(call, call.output[:tokens].view(tokens, heads, -1), call.lse[:tokens])

    def run(self, scene: Scene) -> RunResult:
        """Build and run one step."""
        call = self.call(scene)
        self.forward(call, self.builder.build(call.batch))
        return self.result(call, scene)

    def compare(self, call: Dense | Paged, scene: Scene, what: str) -> None:
        """
        Compare the results of a step that ran with the oracle's.

        Raises:
            AssertionError: They differ; it begins with `what`.
        """
        try:
            compare(self.result(call, scene), self.backend, scene)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error


def _note_of(error: Exception, cache: KVCache | None) -> str:
    """Say what of the contract a forward that raised has passed by; empty where the error does not show it."""
    if cache is None and "NoneType" in str(error):
        return (
            'the request has paged=False, and so no KV cache. `features = ["paged"]` and `paged = true` declare pages '
            "besides contiguous K/V; for pages only, add [[rules]] with when = { paged = false } and a reason"
        )
    if any(int(number) >= NO_BLOCK for number in re.findall(r"index (\d{7,})", str(error))):
        return f"entries of a block table behind a request's keys are {NO_BLOCK:,} and more, and no block"
    return ""


def limits_of(scene: Scene) -> Limits:
    """Return the tightest limits that the scene fits in."""
    case = scene.case
    return Limits(
        max_num_reqs=len(case.query_lens),
        max_num_tokens=case.num_tokens + case.num_padding_tokens,
        max_seq_len=longest_of(case),
        num_blocks=max(2, scene.num_blocks),
    )


def longest_of(case: Case) -> int:
    """Return the longest sequence that the CPU knows of: where it has bounds, one that is longer than any."""
    return max(1, *case.seq_lens, *case.key_lens) + 3 * (case.lens_on_cpu != "exact")


def run(backend: LoadedBackend, scene: Scene, *, host_writes: bool = False) -> RunResult:
    """Build and run one step within the tightest limits. Arguments as of `SceneRunner`."""
    return SceneRunner(backend, scene, host_writes=host_writes, limits=limits_of(scene)).run(scene)


def check(backend: LoadedBackend, scene: Scene, *, host_writes: bool = False) -> RunResult:
    """
    Run a scene and compare output and LSE with the oracle's. Arguments as for `run`.

    Raises:
        AssertionError: They differ, or padding was written.
    """
    ran, case = run(backend, scene, host_writes=host_writes), scene.case
    compare(ran, backend, scene)
    for name, rows in (("output", ran.call.output[case.num_tokens :]), ("lse", ran.call.lse[case.num_tokens :])):
        if not torch.equal(rows, torch.full_like(rows, CANARY)):
            raise AssertionError(f"{name}: rows beyond the batch's {case.num_tokens} tokens were written")
    return ran


def compare(ran: RunResult, backend: LoadedBackend, scene: Scene) -> None:
    """
    Compare output and LSE with the oracle's.

    Raises:
        AssertionError: They differ.
    """
    exact, dtype, scaled = scene.expected(), ran.output.dtype, scene.rounding is not None
    try:
        assert_output(ran.output, scene)
        if backend.agreement.requirements.return_lse:
            expected = exact.lse_with_sink if backend.impl_class.lse_includes_sink else exact.lse
            assert_close(ran.lse, expected, dtype=dtype, what="lse", scaled_keys=scaled)
    except DifferenceError as error:
        raise AssertionError(f"{error}{_only_in(error.rows, scene.case)}") from error
    passed(backend, scene)


def _only_in(rows: Tensor, case: Case) -> str:
    """Say which of the batch's requests differ, where it is those of one phase in a batch of both."""
    decodes = torch.tensor([count <= case.decode_query_len for count in case.query_lens])
    of_decodes = decodes.repeat_interleave(torch.tensor(case.query_lens))
    if bool(of_decodes.all()) or not bool(of_decodes.any()) or len(of_decodes) != len(rows):
        return ""
    if not bool((rows & ~of_decodes).any()):
        return "; in decodes only"
    return "" if bool((rows & of_decodes).any()) else "; in prefills only"


def step_of(whole: Scene, spans: Sequence[tuple[int, int]]) -> Scene:
    """
    Return a step in which some of the new tokens of a scene are new, with the same K/V in the same pages.

    Args:
        whole: The scene of all steps.
        spans: The first and behind the last of these tokens, for each request, counted from the start of its sequence.
    """
    contexts = whole.case.context_lens
    case = evolve(
        whole.case,
        query_lens=tuple(end - start for start, end in spans),
        context_lens=tuple(start for start, _ in spans),
    )
    new = [slice(start - context, end - context) for (start, end), context in zip(spans, contexts, strict=True)]
    return evolve(
        whole,
        case=case,
        queries=tuple(rows[part] for rows, part in zip(whole.queries, new, strict=True)),
        keys=tuple(rows[:end] for rows, (_, end) in zip(whole.keys, spans, strict=True)),
        values=tuple(rows[:end] for rows, (_, end) in zip(whole.values, spans, strict=True)),
        masks=None
        if whole.masks is None
        else tuple(mask[part, :end] for mask, part, (_, end) in zip(whole.masks, new, spans, strict=True)),
    )


def padded_for(case: Case, spare: int) -> Case:
    """Return a case of equally long queries, padded with the rows of so many more requests."""
    return evolve(case, num_padding_tokens=spare * case.query_lens[0])
