"""Steps that a host built, recorded as shapes: lengths and terms, and nothing that a tensor holds."""

from __future__ import annotations

import json
import logging
import os
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve, frozen

from attnplug.contract.step_builder import StepBuilder
from attnplug.errors import AttnplugError, RequestError, shown
from attnplug.negotiation.agreement import Agreement
from attnplug.request.device import Device

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug.contract.attention import Attention
    from attnplug.contract.calls.advance import DecodeInputs
    from attnplug.contract.captures import Captures
    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.loaded import LoadedBackend
    from attnplug.contract.vendor import Metadata, MetadataBuilder

FORMAT: Final = "attnplug-steps"
VERSION: Final = 1

_MOST_BYTES: Final = 64 << 20
"""Bytes of a file at most; recording ends there. A step of 256 requests has about 2,500."""

_log = logging.getLogger("attnplug")


@frozen
class RecordedLayer:
    """
    Layers that share an agreement.

    Attributes:
        agreement: What was negotiated, without the plugin's options: these may name files.
        device: The device.
        count: How many layers a builder served.
        dcp_size: Ranks that share the KV cache.
    """

    agreement: Agreement
    device: Device
    count: int
    dcp_size: int = 1


@frozen
class RecordedStep:
    """
    One build of metadata. Requests without new tokens, which pad graphs, are not in it.

    Attributes:
        layer: Whose step it is.
        query_lens: New tokens of each request; None where they are on the device alone, and no build reads them.
        seq_lens: Keys of each request, bounds where ``seq_lens_cpu_kind`` says so; None as for `query_lens`.
        in_graph: Whether a CUDA graph was replayed.
    """

    layer: RecordedLayer
    query_lens: tuple[int, ...] | None
    seq_lens: tuple[int, ...] | None
    in_graph: bool


@frozen
class Recording:
    """
    A recorded file.

    Attributes:
        versions: Of attnplug, torch and Python.
        steps: The steps, in order.
    """

    versions: Mapping[str, str]
    steps: tuple[RecordedStep, ...]


class Recorder:
    """
    Writes the steps of a process to a file, each at once: a process that crashes leaves all of them.

    Nothing that is there is written over. ``{pid}`` in the name is the process's number; without it the first process
    writes the file of that name, and others add a dot and their number. A file that cannot be written is a warning,
    and recording ends; so it does at 64 MiB.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = Lock()
        self._descriptor: int | None = None  # a write is whole: no buffer is lost with the process
        self._layers: dict[RecordedLayer, int] = {}
        self._left = _MOST_BYTES

    def record(self, layer: RecordedLayer, batch: Batch, *, in_graph: bool = False) -> None:
        """Write a step. Lengths are those that the CPU has: nothing waits for the device."""
        query_lens, seq_lens = _lengths_of(batch)
        step = {"query_lens": query_lens, "seq_lens": seq_lens, "in_graph": in_graph}
        if self._pid != os.getpid():  # a forked child, in which the lock may be held by a thread that it does not have
            self._begin()
        with self._lock:
            if self._left <= 0:
                return
            try:
                self._write(layer, step)
            except OSError as error:
                self._left = 0
                _log.warning("ATTNPLUG_RECORD=%r: no more steps are recorded: %s", self._path, error)

    def _write(self, layer: RecordedLayer, step: dict[str, Any]) -> None:
        if self._descriptor is None:
            self._descriptor = _open_new(self._path.replace("{pid}", str(self._pid)), self._pid)
            versions = {"attnplug": version("attnplug"), "torch": torch.__version__, "python": sys.version.split()[0]}
            self._line(self._descriptor, {"format": FORMAT, "version": VERSION, "versions": versions})
        if layer not in self._layers:
            self._layers[layer] = len(self._layers)
            self._line(self._descriptor, {"layer": self._layers[layer], **_layer_to_dict(layer)})
        self._line(self._descriptor, {"step": self._layers[layer], **step})
        if self._left <= 0:
            _log.warning("ATTNPLUG_RECORD=%r: the file has 64 MiB, and no more steps are recorded", self._path)

    def _line(self, descriptor: int, value: dict[str, Any]) -> None:
        text = json.dumps(value, separators=(",", ":")) + "\n"
        self._left -= os.write(descriptor, text.encode())


@cache
def recorder(path: str) -> Recorder:
    """Return the recorder of a file, one in a process."""
    return Recorder(path)


class RecordedBuilder(StepBuilder):
    """
    A builder whose steps are recorded, but for those that stand in for real ones: captures and dummy runs.

    Args:
        builder: The vendor's builder.
        backend: The backend that made it.
        impls: The layers that it serves.
        state: Workspace and graph buffers.
        recorder: Where steps are written.
    """

    def __init__(
        self,
        builder: MetadataBuilder,
        backend: LoadedBackend,
        impls: Sequence[Attention],
        state: Captures,
        recorder: Recorder,
    ) -> None:
        super().__init__(builder, backend, impls, state)
        self._recorder = recorder
        agreement = evolve(self.agreement, options={})
        self._layer = RecordedLayer(agreement, backend.device_properties, len(impls), self.parallel.dcp_size)

    def build(self, batch: Batch, *, fast: bool = False, graph: GraphBuffers | None = None) -> Metadata:
        """Build and record a step; as `StepBuilder.build`."""
        metadata = super().build(batch, fast=fast, graph=graph)
        if not batch.dummy:
            self._recorder.record(self._layer, self._with_read_lengths(batch, graph), in_graph=graph is not None)
        return metadata

    def _with_read_lengths(self, batch: Batch, graph: GraphBuffers | None) -> Batch:
        """Return the batch with the lengths that this build has read from the device, where that was agreed."""
        # They are kept with the batch, unless the host owns the inputs of the graph: those would be read once more.
        is_kept = graph is None or not graph.host_owned_inputs
        return self.exact(batch)[0] if self.agreement.reads_lengths and is_kept else batch

    def advance_step(
        self,
        metadata: Metadata,
        *,
        tokens: DecodeInputs | None = None,
        num_queries: int | None = None,
        prefills_to_decodes: bool = False,
    ) -> Metadata:
        """Advance and record a step; as `StepBuilder.advance_step`."""
        found = super().advance_step(
            metadata, tokens=tokens, num_queries=num_queries, prefills_to_decodes=prefills_to_decodes
        )
        if found.graph is None:  # of a graph it was built
            self._recorder.record(self._layer, found.batch)
        return found


def read_steps(path: str | Path) -> Recording:
    """
    Read a recorded file. A last line that a crash cut off is left out.

    Args:
        path: The file of ``ATTNPLUG_RECORD``.

    Raises:
        RequestError: It cannot be read, or is not such a file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
        if lines[-1:] == [""] or _parsed(lines[-1]) is None:
            lines.pop()
        rows = [_parsed(line) for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, str(error)) from error
    head = rows[0] if rows else None
    if head is None or head.get("format") != FORMAT or head.get("version") != VERSION:
        raise _unreadable(path, f"its first line is not that of format {FORMAT!r}, version {VERSION}")
    layers: list[RecordedLayer] = []
    steps: list[RecordedStep] = []
    for number, row in enumerate(rows[1:], 2):
        try:
            if "layer" in (row or ()):
                layers.append(_read_layer(row, len(layers)))
            else:
                steps.append(_read_step(row, layers))
        except (KeyError, TypeError, ValueError, AttnplugError) as error:
            raise _unreadable(path, f"line {number}: {error}") from error
    return Recording(dict(head.get("versions", {})), tuple(steps))


def _lengths_of(batch: Batch) -> tuple[list[int] | None, list[int] | None]:
    """Return new tokens and keys of the requests that have new tokens, as far as the CPU has them."""
    starts, lengths = batch.query_start_loc_cpu, batch.seq_lens_cpu
    keys = None if lengths is None else lengths.tolist()
    new = None if starts is None else starts.diff().tolist()
    if new is None:
        return None, keys
    count = batch.num_reqs - batch.num_padded_reqs
    present = [number for number, length in enumerate(new[:count]) if length]
    return [new[number] for number in present], None if keys is None else [keys[number] for number in present]


def _open_new(path: str, pid: int) -> int:
    """
    Open a file that is not there yet.

    Raises:
        OSError: Both names are taken, or the folder cannot be written.
    """
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, how, 0o666)
    except FileExistsError:
        return os.open(f"{path}.{pid}", how, 0o666)


def _layer_to_dict(layer: RecordedLayer) -> dict[str, Any]:
    return {
        "agreement": layer.agreement.to_dict(),
        "device": layer.device.to_dict(),
        "count": layer.count,
        "dcp_size": layer.dcp_size,
    }


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _read_layer(row: Any, number: int) -> RecordedLayer:
    if row["layer"] != number:
        raise ValueError(f"layer {number} was expected, and it is {shown(row['layer'])}")
    count, ranks = row["count"], row["dcp_size"]
    if not all(type(each) is int and each >= 1 for each in (count, ranks)):
        raise ValueError(f"count={shown(count)} and dcp_size={shown(ranks)} are no counts")
    return RecordedLayer(Agreement.from_dict(row["agreement"]), Device.from_dict(row["device"]), count, ranks)


def _read_step(row: Mapping[str, Any] | None, layers: Sequence[RecordedLayer]) -> RecordedStep:
    if row is None:
        raise ValueError("it is no JSON object")
    number = row["step"]
    if type(number) is not int or not 0 <= number < len(layers):
        raise ValueError(f"it is a step of layer {shown(number)}, which no line before it has")
    query_lens, seq_lens = _lengths(row["query_lens"]), _lengths(row["seq_lens"])
    if query_lens is not None and seq_lens is not None:
        requested = layers[number].agreement.requirements
        has_context = requested.attn_type == "decoder" and requested.paged  # others may have padded queries
        pairs = list(zip(query_lens, seq_lens, strict=True))
        if has_context and any(new > keys for new, keys in pairs):
            raise ValueError("a request has more new tokens than keys")
    if type(row["in_graph"]) is not bool:
        raise TypeError(f"in_graph={shown(row['in_graph'])} is neither true nor false")
    return RecordedStep(layers[number], query_lens, seq_lens, row["in_graph"])


def _lengths(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(each) is int and 0 < each < 2**31 for each in value):
        raise ValueError(f"{shown(value)} are no lengths")
    return tuple(value)


def _unreadable(path: str | Path, reason: str) -> RequestError:
    return RequestError(
        f"the recorded steps {str(path)!r} cannot be read: {reason}",
        "it is a file that a process wrote with ATTNPLUG_RECORD",
        "record again",
    )
