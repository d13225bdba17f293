"""The page of model configurations: each with its answer on four devices, from the manifests of the workspace."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from attnplug.cli.plan import plan_model
from attnplug.discovery.plugin import Known, Plugin
from attnplug.discovery.registry import Registry
from attnplug.errors import RequirementsError
from attnplug.models.description import describe_model
from attnplug.models.fields import LIBRARY
from attnplug.models.parallel import cache_bytes, shard
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import process
from tools.capabilities import manifests

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.cli.plan import ModelPlan
    from attnplug.models.description import ModelDescription
    from attnplug.request.requirements import Requirements

FIXTURES: Final = "core/tests/models/configurations.json"
DEVICES: Final = {"8.0": "cuda:8.0", "9.0": "cuda:9.0", "10.0": "cuda:10.0", "CPU": "cpu"}
_SHOWN: Final = {
    "sliding_window": "window {}",
    "attention_chunk": "chunks of {}",
    "logits_soft_cap": "soft cap {:g}",
    "alibi": "ALiBi",
    "sinks": "sinks",
    "attn_bias": "additive bias",
    "kv_sharing": "shared KV cache",
    "block_sparse": "block-sparse",
}
_KINDS: Final = {"encoder": "encoder", "encoder_only": "encoder", "encoder_decoder": "cross attention"}
_INTRODUCTION: Final = """\
# Models

What model configurations request of attention, and which backend `attnplug plan` chooses on each device, with the
plugins of this workspace and their libraries installed. This page is generated from `{fixtures}` and the manifests by
`make tables`, and a test fails where it is stale.

- *attention*: layers x query heads / KV heads x size of a head, dtype, and what else they request. *Besides* are layers
  that are no attention over keys, such as recurrences: they run on their own implementation.
- *bytes*: the KV cache per token on one device, and on each of two with tensor parallelism; `!` where two devices
  cannot share the heads.
- Two backends in a cell serve different layers of the model. *none*: no backend serves all of its layers together, for
  the reason below.
- The dtype is that of the configuration, or what is assumed without one.

The field values are those of the published file, or those that {library} writes for a configuration class: the last
column says which.

| model | type | attention | bytes | {devices} | values from |
| --- | --- | --- | --- | {rules} | --- |
"""


def page(root: Path) -> str:
    """Return the page."""
    path = root / FIXTURES
    fixtures = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    notes: dict[str, str] = {}
    with only(root):
        rows = [row(fixture, notes) for fixture in fixtures]
    heads = _INTRODUCTION.format(
        fixtures=FIXTURES,
        library=LIBRARY,
        devices=" | ".join(DEVICES),
        rules=" | ".join("---" for _ in DEVICES),
    )
    listed = [f"- {text}" for text in notes]
    return "\n".join([heads + "\n".join(rows), "", "## Why not", "", *listed, ""])


@contextmanager
def only(root: Path) -> Iterator[None]:
    """Let this process have the backends of a workspace alone, in the order of their names, whatever is installed."""
    found = manifests(root)
    plugins = [
        Plugin(each.name, f"{each.name}.plugin", f"attnplug-{each.name}", "0", each, built_in=each.name == "torch")
        for each in found
    ]
    registry = Registry(plugins, known=Known(()), version_of=lambda _: None)
    before = process.PROCESS.state
    process.PROCESS.state = process.ProcessState(
        registry, Settings(), registry.generation, own_device=Device.parse("cpu")
    )
    try:
        yield
    finally:
        process.PROCESS.state = before


def row(fixture: dict[str, Any], notes: dict[str, str]) -> str:
    """Return the row of one configuration; `notes` collects reasons."""
    model = described(fixture)
    devices = [Device.parse(device) for device in DEVICES.values()]
    cells = [_cell(plan_model(model, device, assume_installed=True), notes) for device in devices]
    return _row(fixture["name"], f"`{model.model_type}`", _attention(model), _bytes(model), *cells, fixture["source"])


def described(fixture: dict[str, Any]) -> ModelDescription:
    """Return the description of a fixture's files, as a folder holds them."""
    with TemporaryDirectory() as folder:
        for name in ("config", "hf_quant_config"):
            if name in fixture:
                Path(folder, f"{name}.json").write_text(json.dumps(fixture[name]), encoding="utf-8")
        return describe_model(folder)


def _cell(found: ModelPlan, notes: dict[str, str]) -> str:
    if found.decided is not None and found.serves:
        return ", ".join(f"`{id_}`" for id_ in dict.fromkeys(group.selection.id for group in found.decided.groups))
    for other in found.model.unserved or (() if found.model.layers else found.model.others):
        notes[f"{found.model.model_type}: {other.why}."] = ""
    if found.failure is not None:
        layer = found.failure.problem
        notes[f"{found.model.model_type} on {found.device}: {layer}."] = ""
    return "none"


def _attention(model: ModelDescription) -> str:
    groups: dict[Requirements, int] = {}
    for layer in model.layers:
        groups[layer.requirements] = groups.get(layer.requirements, 0) + 1
    parts = [_group(requirements, count) for requirements, count in groups.items()]
    parts += [f"besides {len(other.indices)} {other.kind}" for other in model.others if not other.is_attention]
    parts += [f"{len(other.indices)} {other.kind}" for other in model.unserved]
    return "; ".join(parts)


def _group(wanted: Requirements, count: int) -> str:
    shown = [
        text.format(value) for name, text in _SHOWN.items() if (value := getattr(wanted, name)) not in (None, False)
    ]
    kind = [_KINDS[wanted.attn_type]] if wanted.attn_type in _KINDS else []
    cache = [f"KV cache {wanted.kv_cache_dtype}"] if wanted.kv_cache_dtype != wanted.dtype else []
    return ", ".join(
        [
            f"{count} x {wanted.num_q_heads}/{wanted.num_kv_heads} x {wanted.head_size} {wanted.dtype}",
            *kind,
            *shown,
            *cache,
        ]
    )


def _bytes(model: ModelDescription) -> str:
    if not model.layers:
        return "-"
    return ", ".join(_bytes_on(model, size) for size in (1, 2))


def _bytes_on(model: ModelDescription, size: int) -> str:
    try:
        sizes = [cache_bytes(shard(layer.requirements, size).requirements) for layer in model.layers]
    except RequirementsError:
        return "!"
    return f"{sum(each or 0 for each in sizes):,}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
