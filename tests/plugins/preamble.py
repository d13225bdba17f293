"""The preamble of programs that tests of installed plugins run in a fresh Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

PREAMBLE = """
import json, sys
before = set(sys.modules)
import attnplug
request = attnplug.Requirements(head_size=8, num_q_heads=4, num_kv_heads=2, dtype="float32")
cpu = attnplug.Device.cpu()
def verdicts(explanation):
    return {v.id: [v.status, v.distribution, [str(r) for r in v.reasons], str(v.fix)] for v in explanation.verdicts}
def listing():
    registry = attnplug.registry()
    plugins = [[p.name, p.module, p.distribution, p.version, str(p.problem)] for p in registry.plugins]
    return [plugins, [str(note) for note in registry.notes]]
"""


class RunCode(Protocol):
    """Installs plugins, runs code after the preamble in a fresh Python or a fork, returns what it printed."""

    def __call__(
        self, code: str, *plugins: str, sites: tuple[Path, ...] = (), forked: bool = False, **environment: str
    ) -> Any: ...
