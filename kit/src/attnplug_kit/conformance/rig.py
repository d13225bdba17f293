"""One layer with its builder and state, for tests that run several steps on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.contract import Limits
from attnplug_kit.oracle.running import RunResult
from attnplug_kit.oracle.scene import Paged

if TYPE_CHECKING:
    from attnplug.contract import Backend, Layer, Metadata
    from attnplug_kit.oracle.scene import Dense, Scene


_LIMITS: Final = Limits(max_num_reqs=16, max_num_tokens=1024, max_seq_len=1024)


class Rig:
    """
    A layer that is ready to run steps.

    Args:
        backend: The backend.
        scene: A scene of the layer.
        layer: The layer; None is the scene's.
        host_writes: Whether new K/V go into the cache apart from forward.
        limits: What its steps may need.
    """

    def __init__(
        self,
        backend: Backend,
        scene: Scene,
        *,
        layer: Layer | None = None,
        host_writes: bool = False,
        limits: Limits = _LIMITS,
    ) -> None:
        self.backend = backend
        writer = "host" if host_writes else None
        scales = backend.impl_class.static_scales
        own = layer or scene.layer(device=backend.device, cache_write=writer, scales=scales)
        self.impl = backend.make_impl(own)
        self.state = backend.make_state(limits)
        self.builder = backend.make_builder([self.impl], self.state)

    def call(self, scene: Scene) -> Dense | Paged:
        """Return the arguments of one step."""
        is_paged = self.backend.agreement.requirements.paged
        device = self.backend.device
        return scene.paged(self.backend, device) if is_paged else scene.dense(device)

    def forward(self, call: Dense | Paged, metadata: Metadata) -> None:
        """Run a step that was built."""
        cache = call.cache if isinstance(call, Paged) else None
        slots = call.batch.slot_mapping
        brings = call.key is not None and call.value is not None and slots is not None
        if self.impl.host_writes and cache is not None and brings:
            self.impl.write_kv(call.key, call.value, cache, slots)  # type: ignore[arg-type]
        lse = call.lse if self.backend.agreement.requirements.return_lse else None
        self.impl.forward(call.query, call.key, call.value, cache, metadata, call.output, lse=lse)

    def ran(self, call: Dense | Paged, scene: Scene) -> RunResult:
        """Return the results of a step that ran."""
        tokens, heads = scene.case.num_tokens, scene.case.num_q_heads
        return RunResult(call, call.output[:tokens].view(tokens, heads, -1), call.lse[:tokens])

    def run(self, scene: Scene) -> RunResult:
        """Build and run one step."""
        call = self.call(scene)
        self.forward(call, self.builder.build(call.batch))
        return self.ran(call, scene)
