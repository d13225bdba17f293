"""The first tier: plain attention, over everything that every backend declares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.rig import Rig
from attnplug_kit.conformance.serving import load_for, plain, serve
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.oracle.running import compare
from attnplug_kit.oracle.scene import materialize

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug_kit.conformance.record import Record
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle.scene import Dense


def _values_of(*names: str) -> Any:
    def points(subject: Subject) -> Mapping[str, Any]:
        asks = field_values_of(subject).asks
        return {str(capability): ask for capability, ask in asks.items() if capability.field in names}

    return points


class Basic(Tier):
    """Plain attention: dtypes, head sizes, query heads per KV head, pages and layouts, batches of each kind."""

    @over(_values_of("dtype", "head_size", "gqa_ratio", "paged", "block_size", "kv_layout"))
    def test_plain_attention(self, subject: Subject, record: Record, point: Any) -> None:
        """Each declared dtype, size and layout gives the oracle's output."""
        serve(subject, point, record, point.case(seed=1))

    def test_mixed_batch(self, subject: Subject, record: Record) -> None:
        """Decodes come first, then prefills, and each row of the output is its own token's."""
        ask = plain(subject)
        serve(subject, ask, record, ask.case(seed=2, query_lens=(1, 1, 1, 9, 21), context_lens=(40, 3, 17, 0, 25)))

    def test_one_token(self, subject: Subject, record: Record) -> None:
        """A request of a single token attends itself."""
        ask = plain(subject)
        serve(subject, ask, record, ask.case(seed=3, query_lens=(1,), context_lens=(0,)))

    def test_rows_of_wider_tensors(self, subject: Subject) -> None:
        """Rows may lie apart: those of one fused projection, and a block table that is as wide as the engine's."""
        scene = materialize(plain(subject).case(seed=6))
        rig = Rig(load_for(subject, plain(subject), scene.case), scene)
        call = _wider(rig.call(scene))
        rig.forward(call, rig.builder.build(call.batch))
        try:
            compare(rig.ran(call, scene), rig.backend, scene)
        except AssertionError as error:
            raise AssertionError(f"{subject}: rows of wider tensors: {error}") from error

    def test_profiling_run(self, subject: Subject) -> None:
        """A run without metadata and cache, which measures memory before there is any, succeeds."""
        scene = materialize(plain(subject).case(seed=7))
        rig = Rig(load_for(subject, plain(subject), scene.case), scene)
        call = rig.call(scene)
        lse = call.lse if rig.backend.agreement.requirements.return_lse else None
        try:
            rig.impl.forward(call.query, call.key, call.value, None, None, call.output, lse=lse)
        except Exception as error:
            raise AssertionError(f"{subject}: a profiling run, without metadata and cache, raised {error!r}") from error

    @needs(phases=("decode",))
    def test_decodes_alone(self, subject: Subject, record: Record) -> None:
        """A batch may have no prefills."""
        ask = plain(subject, phases=("decode",))
        serve(subject, ask, record, ask.case(seed=4, query_lens=(1, 1, 1), context_lens=(0, 64, 31)))

    @needs(phases=("prefill",))
    def test_prefills_alone(self, subject: Subject, record: Record) -> None:
        """A batch may have no decodes."""
        ask = plain(subject, phases=("prefill",))
        serve(subject, ask, record, ask.case(seed=5, query_lens=(2, 33, 17), context_lens=(0, 5, 16)))


def _wider(call: Dense) -> Dense:
    """Return a call whose rows are parts of wider ones, and whose block table has columns that nobody uses."""
    names = ("query", "key", "value", "output", "lse")
    changed: dict[str, Any] = {name: _apart(rows) for name in names if (rows := getattr(call, name)) is not None}
    table = call.batch.block_table
    if table is not None:
        nowhere = torch.full_like(table, int(table.max()) + 10**6)
        wide = torch.cat([table, nowhere, nowhere], 1)[:, :-1]
        host = wide if wide.device.type == "cpu" else None
        changed["batch"] = evolve(call.batch, block_table=wide, block_table_cpu=host)
    return evolve(call, **changed)


def _apart(rows: Tensor) -> Tensor:
    flat = rows.flatten(1)
    wide = torch.cat([torch.full_like(flat, torch.nan), flat, flat], 1)
    return wide[:, flat.shape[1] : 2 * flat.shape[1]].view(rows.shape)
