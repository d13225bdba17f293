"""
A step to measure: its requests, the backend that runs it, and everything that its one layer needs.

`Step` is data, `Planner` builds its metadata, and `Rig`, a planner with tensors, runs it.
"""

from __future__ import annotations

import random
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, frozen

from attnplug import Registry
from attnplug.errors import DeviceError, RequestError
from attnplug.request import Device, Requirements, Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug.batching import BatchAssembler
    from attnplug.contract import Attention, Batch, GraphBuffers, KVCache, Layer, LoadedBackend, Metadata, StepBuilder

LAYER = "layer"


@frozen
class Step:
    """
    One step of an engine, through one layer.

    Attributes:
        what: The step in words.
        query_lens: New tokens of each request, decodes first.
        cached_lens: Tokens of each request whose K/V are cached.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_size: Size of a head.
        head_size_v: Size of a value head; None is `head_size`.
        latent: Whether keys are latents, and their first `head_size_v` elements the values.
        topk: Tokens that each new one attends to, at random among those up to itself; None for all of these.
    """

    what: str
    query_lens: tuple[int, ...]
    cached_lens: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    head_size_v: int | None = None
    latent: bool = False
    topk: int | None = None

    @property
    def size_v(self) -> int:
        """Size of a value head."""
        return self.head_size_v or self.head_size

    @property
    def scale(self) -> float:
        """The softmax scale. Of latents it is that of DeepSeek-V3, whose keys have 192 elements before they are one."""
        return float((192 if self.latent else self.head_size) ** -0.5)

    @property
    def num_reqs(self) -> int:
        """Number of requests."""
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        """New tokens of all requests."""
        return sum(self.query_lens)

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Keys of each request, new ones included."""
        return tuple(new + old for new, old in zip(self.query_lens, self.cached_lens, strict=True))

    @property
    def is_decode(self) -> bool:
        """Whether every request has one new token."""
        return set(self.query_lens) == {1}

    @property
    def is_ragged(self) -> bool:
        """Whether requests differ in length."""
        return len(set(self.seq_lens)) > 1

    def requirements(self, dtype: str, **engine: Any) -> Requirements:
        """Return the layer's requirements; the negotiation chooses block size and layout."""
        return Requirements(
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            latent=self.latent,
            topk=self.topk,
            dtype=dtype,
            **engine,
        )


def decodes(requests: int, length: int, **layer: Any) -> Step:
    """Return a step in which all requests decode, each of the same length, the new token included."""
    what = f"decode, {requests} request{'s' * (requests > 1)} of {length} tokens"
    return Step(what, (1,) * requests, (length - 1,) * requests, **layer)


def ragged_decodes(requests: int, shortest: int, longest: int, **layer: Any) -> Step:
    """Return a step in which all requests decode, their lengths spread evenly between two."""
    spread = max(1, requests - 1)
    cached = tuple(shortest + (longest - shortest) * i // spread - 1 for i in range(requests))
    return Step(f"decode, {requests} requests of {shortest} to {longest} tokens", (1,) * requests, cached, **layer)


def first_prefills(requests: int, length: int, **layer: Any) -> Step:
    """Return a step of first prefills of one length."""
    what = f"first prefill, {requests} prompt{'s' * (requests > 1)} of {length} tokens"
    return Step(what, (length,) * requests, (0,) * requests, **layer)


def mixed(decoding: int, length: int, prompts: int, prompt: int, **layer: Any) -> Step:
    """Return a step of decodes and first prefills."""
    what = f"{decoding} decodes of {length} tokens and {prompts} first prefills of {prompt}"
    return Step(what, (1,) * decoding + (prompt,) * prompts, (length - 1,) * decoding + (0,) * prompts, **layer)


@frozen
class Target:
    """
    The backend that is measured, and its device.

    Attributes:
        backend: A backend, or ``backend/variant``; None for the one that a selection chooses.
        device: ``"cpu"`` or ``"cuda"``; None for this machine's.
        threads: Threads of torch's own kernels on the CPU; None for torch's default.
        baseline: A file of direct library calls; None for torch's.
        host: The host whose steps are measured, natively and through attnplug; None for attnplug alone.
    """

    backend: str | None = None
    device: str | None = None
    threads: int | None = None
    baseline: str | None = None
    host: str | None = None

    def check(self) -> None:
        """
        Check what can be checked before anything is measured.

        Raises:
            UnknownBackendError: No installed or known backend has this name.
            RequestError: The number of threads is invalid, or the file of the baseline is not there.
        """
        if self.threads is not None and self.threads < 1:
            raise RequestError(f"--threads {self.threads} was given", "it is a whole number from 1 on", "leave it out")
        if self.backend is not None:
            registry_without_settings().check_name(self.backend)
        if self.baseline is not None and not Path(self.baseline).is_file():
            raise RequestError(f"--baseline {self.baseline} was given", "there is no such file", "name a Python file")

    def options(self) -> list[str]:
        """Return the options of the command line for this target."""
        return [word for name, value in asdict(self).items() if value is not None for word in (f"--{name}", str(value))]

    def prepare(self) -> Device:
        """
        Set torch's threads, and return the device. Torch is imported: it finds devices that NVML does not.

        Raises:
            DeviceError: This machine has no such device.
        """
        import torch  # noqa: PLC0415 - torch takes a second to import

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        found = Device.cpu() if self.device == "cpu" else Device.current()
        if self.device not in (None, found.type):
            raise DeviceError(
                f"--device {self.device} was given", f"this machine's device is {found}", "name one that is here"
            )
        return found

    def load(self, requirements: Requirements) -> LoadedBackend:
        """
        Select and load.

        Raises:
            NoBackendError: Nothing can serve, or not what was named.
            PluginError: The backend fails to load.
        """
        from attnplug import load  # noqa: PLC0415 - imports torch

        return load(requirements, self.prepare(), backend=self.backend)


def registry_without_settings() -> Registry:
    """Return the installed plugins as a process without settings of attnplug finds them."""
    return Registry.scan(Settings())


def dtype_on(device: Device) -> str:
    """Return the dtype that engines use on a device."""
    return "float32" if device.type == "cpu" else "bfloat16"


@frozen(eq=False)
class Planner:
    """
    What builds the metadata of a step. It has no KV cache: a build reads none.

    Attributes:
        step: The step.
        backend: The backend.
        layer: Its one layer.
        impl: The layer's implementation.
        builder: Its builder.
        blocks: Physical blocks of each request, in random order.
    """

    step: Step
    backend: LoadedBackend
    layer: Layer
    impl: Attention
    builder: StepBuilder
    blocks: tuple[list[int], ...]

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return self.backend.agreement.block_size or 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return 1 + sum(map(len, self.blocks))

    def batch(self, assembler: BatchAssembler | None = None) -> Batch:
        """Return the batch of the step, from a new assembler or one that is used again."""
        from attnplug.batching import BatchAssembler  # noqa: PLC0415 - imports torch
        from attnplug.contract import Batch  # noqa: PLC0415 - likewise

        if not self.backend.agreement.requirements.paged:
            return Batch.from_lengths(self.step.query_lens, self.step.seq_lens, device=self.backend.device)
        assembler = assembler or BatchAssembler.of(self.backend.agreement, self.backend.device)
        for new, old, blocks in zip(self.step.query_lens, self.step.cached_lens, self.blocks, strict=True):
            assembler.add(new, old, blocks)
        return assembler.finish()

    def arrays(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the step as a host has it in arrays, int32: new tokens, cached tokens, and rows of a block table."""
        import torch  # noqa: PLC0415 - torch takes a second to import

        query_lens, cached_lens = self.step.query_lens, self.step.cached_lens
        table = torch.zeros(self.step.num_reqs, max(map(len, self.blocks)), dtype=torch.int32)
        for row, blocks in zip(table, self.blocks, strict=True):
            row[: len(blocks)] = torch.tensor(blocks)
        return torch.tensor(query_lens, dtype=torch.int32), torch.tensor(cached_lens, dtype=torch.int32), table


@frozen(eq=False)
class Rig(Planner):
    """
    A step that can run.

    Attributes:
        cache: The layer's KV cache, with the K/V of the past; None of contiguous K/V.
        past: Keys and values of the past, ``(sum(cached_lens), num_kv_heads, size)`` each.
        query: ``(num_tokens, num_q_heads, head_size)``.
        key: ``(num_tokens, num_kv_heads, head_size)``.
        value: ``(num_tokens, num_kv_heads, size_v)``; of latents a view of `key`, and no call has it.
        output: ``(num_tokens, num_q_heads * size_v)``.
        metadata: Of the step.
        indices: ``(num_tokens, topk)`` int32 slots of the tokens that each new one attends to; None without `topk`.
    """

    cache: KVCache | None
    past: tuple[Tensor, Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    metadata: Metadata
    indices: Tensor | None = None

    @property
    def given_value(self) -> Tensor | None:
        """The value of a call; None of latents."""
        return None if self.step.latent else self.value

    @property
    def slots(self) -> Tensor:
        """``(num_tokens,)`` slots of the new K/V."""
        found: Tensor = self.metadata.batch.slot_mapping  # type: ignore[assignment]
        return found

    @property
    def table(self) -> Tensor:
        """``(num_reqs, columns)`` blocks of each request."""
        found: Tensor = self.metadata.batch.block_table  # type: ignore[assignment]
        return found

    @property
    def cached(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the past, and their slots."""
        import torch  # noqa: PLC0415 - it is imported by now

        size = self.block_size
        pairs = zip(self.blocks, self.step.cached_lens, strict=True)
        slots = [blocks[place // size] * size + place % size for blocks, length in pairs for place in range(length)]
        return *self.past, torch.tensor(slots, dtype=torch.int64, device=self.query.device)

    def direct_cache(self) -> KVCache:
        """Return another KV cache of the agreed form with the unquantized K/V of the past, for direct library calls."""
        cache = self.backend.make_cache(self.num_blocks)
        keys, values, slots = self.cached
        places = slots // self.block_size, slots % self.block_size
        cache.k[places], cache.v[places] = keys, values  # of latents the same memory, and the same numbers
        return cache

    def for_step(self, step: Step, blocks: tuple[list[int], ...], **rows: Any) -> Rig:
        """Return another step of the same layer in blocks of this cache, with the tensors that differ."""
        other = evolve(self, step=step, blocks=blocks, **rows)
        return evolve(other, metadata=other.builder.build(other.batch()))

    def forward(self) -> Callable[[], Tensor]:
        """Return the layer's calls as a host makes them: the cache write if it is the host's, and `forward`."""
        impl, cache, slots = self.impl, self.cache, self.slots
        query, key, value, metadata, output = self.query, self.key, self.given_value, self.metadata, self.output
        forward = impl.forward if self.indices is None else partial(impl.forward, indices=self.indices)

        def call() -> Tensor:
            forward(query, key, value, cache, metadata, output)
            return output

        def call_after_write() -> Tensor:
            impl.write_kv(key, value, cache, slots)
            return call()

        return call_after_write if impl.host_writes else call

    def forward_op(self) -> Callable[[], Tensor]:
        """Return them as a compiled model makes them: the opaque ops. They need the metadata in a forward context."""
        impl, cache, output = self.impl, self.cache, self.output
        query, key, value = self.query, self.key, self.given_value
        forward = impl.forward_op if self.indices is None else partial(impl.forward_op, indices=self.indices)

        def call() -> Tensor:
            forward(query, key, value, cache, output)
            return output

        def call_after_write() -> Tensor:
            impl.write_kv_op(key, value, cache)
            return call()

        return call_after_write if impl.host_writes else call


def make_planner(step: Step, target: Target, **engine: Any) -> Planner:
    """
    Return what builds a step.

    Args:
        step: The step.
        target: Backend and device.
        engine: Fields of the requirements that an engine sets, and those of the model that a step has not; the dtype
            is by default what engines use on the device.

    Raises:
        NoBackendError: Nothing can serve it.
        PluginError: The backend fails to load.
    """
    from attnplug import contract  # noqa: PLC0415 - imports torch

    fields = {"dtype": dtype_on(target.prepare()), **engine}
    backend = target.load(step.requirements(**fields))
    size = backend.agreement.block_size or 1
    counts = [-(-length // size) for length in step.seq_lens]
    limits = contract.Limits(
        max_num_reqs=step.num_reqs,
        max_num_tokens=max(step.num_tokens, *step.cached_lens),
        max_seq_len=max(step.seq_lens),
        num_blocks=1 + sum(counts),
    )
    layer = contract.Layer(name=LAYER, scale=step.scale, **_learned(backend))
    impl = backend.make_impl(layer)
    builder = backend.make_builder([impl], backend.make_state(limits))
    return Planner(step, backend, layer, impl, builder, _shuffled(counts))


def _learned(backend: LoadedBackend) -> dict[str, Any]:
    """Return the learned tensors of the layer: sinks and ALiBi slopes, where they were requested."""
    import torch  # noqa: PLC0415 - it is imported by now

    wanted = backend.agreement.requirements
    found: dict[str, Any] = {}
    if wanted.sinks:
        found["sinks"] = torch.linspace(-1.0, 1.0, wanted.num_q_heads, device=backend.device)
    if wanted.alibi is not None:
        found["alibi_slopes"] = torch.logspace(-1.0, -4.0, wanted.num_q_heads, base=2.0, device=backend.device)
    return found


def make_rig(step: Step, target: Target, **engine: Any) -> Rig:
    """Return a step that can run; the backend writes its past. Arguments and errors as for `make_planner`."""
    import torch  # noqa: PLC0415 - torch takes a second to import

    from attnplug.contract import torch_dtype  # noqa: PLC0415 - imports torch

    planner = make_planner(step, target, **engine)
    device, dtype = planner.backend.device, torch_dtype(planner.backend.agreement.requirements.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def rows(count: int, heads: int, size: int) -> Tensor:
        return torch.randn(count, heads, size, generator=generator, device=device).to(dtype)

    def pair(count: int) -> tuple[Tensor, Tensor]:
        key = rows(count, step.num_kv_heads, step.head_size)
        return key, key[..., : step.size_v] if step.latent else rows(count, step.num_kv_heads, step.size_v)

    tokens, is_paged = step.num_tokens, planner.backend.agreement.requirements.paged
    past, (key, value) = pair(sum(step.cached_lens)), pair(tokens)
    rig = Rig(
        **asdict(planner, recurse=False),
        cache=_make_cache(planner, past[1], value) if is_paged else None,
        past=past,
        query=rows(tokens, step.num_q_heads, step.head_size),
        key=key,
        value=value,
        output=torch.empty(tokens, step.num_q_heads * step.size_v, dtype=dtype, device=device),
        metadata=planner.builder.build(planner.batch()),
        indices=_selected(planner),
    )
    _write_past(rig)
    return rig


def _make_cache(planner: Planner, *values: Tensor) -> KVCache:
    """Return a KV cache. One of int8 values has the kit's scales for these values, as a calibration would give them."""
    from attnplug_kit.oracle import int8_rounding  # noqa: PLC0415 - imports torch

    rounding = int8_rounding(planner.backend.agreement.kv_cache_dtype or "", values)
    if rounding is None or rounding.value_scales is None:
        return planner.backend.make_cache(planner.num_blocks, impl=planner.impl)
    cache = planner.backend.make_cache(planner.num_blocks)
    cache["v_scale"].copy_(rounding.value_scales)
    return cache


def capture_graph(planner: Planner) -> tuple[GraphBuffers, Metadata]:
    """
    Return graph buffers of the shortest length that holds the step, and the metadata of their capture. All requests
    have as many new tokens.
    """
    from attnplug.contract import GraphShape  # noqa: PLC0415 - imports torch

    step, builder, state = planner.step, planner.builder, planner.builder.state
    length = next(length for length in builder.graph_lengths if length >= max(step.seq_lens))
    with state.graph_capture(step.num_reqs):
        graph = state.graph(GraphShape(step.num_reqs, step.num_tokens, step.query_lens[0], length))
        return graph, builder.build(graph.dummy_batch(), graph=graph)


def _write_past(rig: Rig) -> None:
    """Write the past into the KV cache by a prefill of each request, since its format is the backend's."""
    step, ends = rig.step, list(accumulate(rig.step.cached_lens))
    for length, end, blocks in zip(step.cached_lens, ends, rig.blocks, strict=True):
        if length:
            key, value = (rows[end - length : end] for rows in rig.past)
            query = key.new_zeros(length, step.num_q_heads, step.head_size)
            output = key.new_empty(length, rig.output.shape[1])
            prefill = evolve(step, query_lens=(length,), cached_lens=(0,))
            rows = {"query": query, "key": key, "value": value, "output": output}
            if rig.indices is not None:
                rows["indices"] = rig.indices.new_full((length, rig.indices.shape[1]), -1)
            rig.for_step(prefill, (blocks,), **rows).forward()()


def _selected(planner: Planner) -> Tensor | None:
    """Return the slots of selected tokens: as many as there are up to a token, in random order, then -1."""
    import torch  # noqa: PLC0415 - it is imported by now

    step, size, device = planner.step, planner.block_size, planner.backend.device
    if step.topk is None:
        return None
    generator, found = torch.Generator(device).manual_seed(1), []
    for new, length, blocks in zip(step.query_lens, step.seq_lens, planner.blocks, strict=True):
        positions, table = torch.arange(length, device=device), torch.tensor(blocks, device=device)
        slots = (table[positions // size] * size + positions % size).int()
        later = positions > positions[length - new :, None]
        order = torch.rand(new, length, generator=generator, device=device).masked_fill_(later, 2.0).argsort(1)
        rows = slots[order].masked_fill_(later.gather(1, order), -1)[:, : step.topk]
        found.append(torch.nn.functional.pad(rows, (0, step.topk - rows.shape[1]), value=-1))
    return torch.cat(found)


def _shuffled(counts: list[int]) -> tuple[list[int], ...]:
    """Return blocks of requests in random order, none of them the null block."""
    blocks = list(range(1, 1 + sum(counts)))
    random.Random(0).shuffle(blocks)
    ends = list(accumulate(counts))
    return tuple(blocks[end - count : end] for count, end in zip(counts, ends, strict=True))
