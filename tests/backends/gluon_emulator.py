"""
An emulator of Gluon, Triton's language of warps and shared memory: it runs kernels on a CPU, which Triton cannot do.

Each partition of a program is a thread, and one thread runs at a time. A random choice picks the next at each barrier,
each wait for an MMA and each arrival. Asynchronous work finishes as late as possible. A copy lands when no thread could
continue without it, or at random, and its buffer is NaN until then. An MMA reads its operands, and a store writes,
only when it is waited for. A kernel that reads a buffer too early, or releases it too early, computes NaN or wrong
values.

Errors that a GPU would not report raise `MisuseError`: unexpected arrivals and copies, deadlocks, values used before
they were waited for, shared-memory writes without a fence, and more shared memory than a program may have.
"""

from __future__ import annotations

import random
import sys
import threading
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHARED_MEMORY: Final = 227 * 1024
"""Bytes of shared memory per program on compute capability 9.0."""

_local = threading.local()


class MisuseError(AssertionError):
    """An invalid operation of a kernel."""


def _require(truth: object, problem: str) -> None:
    if not truth:
        raise MisuseError(problem)


class _StoppedError(Exception):
    """Another partition has failed."""


class _Program:
    """One program: its partitions, of which one runs at a time, and its pending copies."""

    def __init__(self, number: int, programs: int, seed: int) -> None:
        self.number, self.programs, self.random = number, programs, random.Random(seed)
        self.copies: list[Callable[[], None]] = []
        self.shared_bytes = 0
        self.failure: BaseException | None = None
        self._waits: list[tuple[str, Callable[[], bool]] | None] = []
        self._gates: list[threading.Semaphore] = []

    def specialize(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self._waits = [("the start", lambda: True)] * len(partitions)
        self._gates = [threading.Semaphore(0) for _ in partitions]
        threads = [threading.Thread(target=self._run, args=(at, *partition)) for at, partition in enumerate(partitions)]
        for thread in threads:
            thread.start()
        self._gates[self._next()].release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        _require(not self.copies, "copies were pending when the program ended")

    def _run(self, at: int, partition: Callable[..., None], given: tuple[Any, ...]) -> None:
        _local.at, _local.program, _local.mmas, _local.stores, _local.unfenced = at, self, [], [], set()
        try:
            self._enter(at)
            partition(*given)
            _require(not _local.stores, "a store was pending when its partition ended")
            _require(not _local.mmas, "an MMA was never waited for")
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again by the launch
            self.failure = self.failure or error
        finally:
            self._waits[at] = None
            self._switch()

    def pause(self, what: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Let a partition that is ready continue, perhaps the calling one, and return when the calling one may."""
        at = _local.at
        self._waits[at] = (what, ready)
        if self._switch(at):
            self._enter(at)

    def _enter(self, at: int) -> None:
        self._gates[at].acquire()
        if self.failure is not None:
            raise _StoppedError

    def _switch(self, at: int = -1) -> bool:
        """Wake the chosen partition; return whether it is another one. Only one thread runs, so there is no lock."""
        following = self._next()
        if self.failure is not None:
            for gate in self._gates:
                gate.release()
        elif following not in {at, -1}:
            self._gates[following].release()
        return following != at

    def _next(self) -> int:
        ready = self._ready()
        while self.copies and (not ready or self.random.random() < 0.1):
            self.copies.pop(self.random.randrange(len(self.copies)))()
            ready = self._ready()
        waiting = [f"{at} for {wait[0]}" for at, wait in enumerate(self._waits) if wait is not None]
        if waiting and not ready and self.failure is None:
            self.failure = MisuseError(f"all partitions wait: {', '.join(waiting)}")
        return self.random.choice(ready) if ready else -1

    def _ready(self) -> list[int]:
        return [at for at, wait in enumerate(self._waits) if wait is not None and wait[1]()]


def _program() -> _Program:
    return _local.program


class _Barrier:
    """An mbarrier: a phase ends when all arrivals and all expected bytes are complete."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        _require(self.count, "a barrier was used before its init")
        _require(self.pending >= count, f"more than {self.count} arrivals in one phase of a barrier")
        self.pending -= count
        self.bytes += expected
        self._end()

    def land(self, count: int) -> None:
        _require(self.bytes >= count, "more bytes arrived than the barrier expects")
        self.bytes -= count
        self._end()

    def _end(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.count


class _Barriers:
    def __init__(self, count: int) -> None:
        self._all = [_Barrier() for _ in range(count)]

    def index(self, at: int) -> _Barrier:
        _require(0 <= at < len(self._all), f"there is no barrier {at}")
        return self._all[at]


class _Shared:
    """A buffer in shared memory."""

    def __init__(self, data: Tensor, layout: Any) -> None:
        self.data, self.layout = data, layout

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, at: int) -> _Shared:
        _require(0 <= at < len(self.data), f"the buffer has no index {at}")
        return _Shared(self.data[at], self.layout)

    def reshape(self, shape: list[int]) -> _Shared:
        return _Shared(self.data.view(shape), self.layout)

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self.data.permute(order), self.layout)

    def load(self, layout: Any) -> Tensor:
        _require(layout is not None, "a load to registers requires a layout")
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        _require(value.shape == self.data.shape, f"{tuple(value.shape)} stored to {tuple(self.data.shape)}")
        self.data.copy_(value)
        _local.unfenced.add(self.data.data_ptr())


class _Mma:
    """An asynchronous warpgroup MMA, computed when it is waited for."""

    def __init__(self, left: Any, right: _Shared, total: Any) -> None:
        _require(isinstance(right, _Shared), "the right operand of an MMA must be in shared memory")
        _require(not isinstance(total, _Mma), "an MMA accumulates into one that was not waited for")
        self.left, self.right, self.total = left, right, total
        self.value: Tensor | None = None

    def compute(self) -> None:
        unfenced = self.right.data.data_ptr() in _local.unfenced
        _require(not unfenced, "an MMA reads shared memory written without a fence")
        left = self.left.data if isinstance(self.left, _Shared) else self.left
        self.value = left.float() @ self.right.data.float()
        if self.total is not None:
            self.value += self.total


class _Pointer:
    """A pointer, or a block of pointers: offsets into a tensor in elements."""

    def __init__(self, tensor: Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at

    def __add__(self, offsets: Any) -> _Pointer:
        return _Pointer(self.tensor, self.at + offsets)


class TensorDescriptor:
    """A TMA descriptor: a tensor, the box that a copy moves, and its shared-memory layout."""

    def __init__(self, tensor: Tensor, box: list[int], layout: Any) -> None:
        item = tensor.element_size()
        _require(tensor.data_ptr() % 16 == 0, "the address of a described tensor must be a multiple of 16 bytes")
        _require(
            all(stride * item % 16 == 0 for stride in tensor.stride()[:-1]), "strides must be multiples of 16 bytes"
        )
        _require(tensor.stride(-1) == 1, "the last stride of a described tensor must be 1")
        _require(len(box) == tensor.ndim and all(0 < side <= 256 for side in box), f"the box {box} is invalid")
        _require(all(side & (side - 1) == 0 for side in box), f"the sides of a box must be powers of two, not {box}")
        _require(layout.swizzle_byte_width <= box[-1] * item, "the rows of a box are shorter than the swizzle")
        self.base, self.block_shape, self.layout = tensor, tuple(box), layout

    from_tensor = classmethod(lambda cls, tensor, box, layout: cls(tensor, box, layout))

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def parts(self, where: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the part of the tensor that a box covers, and the part of the box that is inside the tensor."""
        pairs = [
            (slice(max(at, 0), max(0, min(at + side, most))), at)
            for at, side, most in zip(where, self.block_shape, self.base.shape, strict=True)
        ]
        inside = tuple(part for part, _ in pairs)
        return inside, tuple(slice(part.start - at, max(part.start, part.stop) - at) for part, at in pairs)


# --- the language -----------------------------------------------------------------------------------------------------


class _Function:
    """A function decorated with `gluon.jit`: called in a kernel, or launched."""

    def __init__(self, function: Callable[..., Any], seed: Callable[[], int]) -> None:
        self.fn, self._seed = function, seed

    def __call__(self, *given: Any) -> Any:
        return self.fn(*given)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        (programs,) = grid

        def launch(*given: Any, num_warps: int, enable_fp_fusion: bool = True) -> None:
            _require(num_warps == 4, "an MMA requires a warpgroup of four warps")
            arguments = [_Pointer(one) if isinstance(one, Tensor) else one for one in given]
            for number in range(programs):
                _local.program = _Program(number, programs, self._seed())
                _local.unfenced = set()
                self.fn(*arguments)

        return launch


def _allocate(kind: torch.dtype, shape: list[int], layout: Any) -> Any:
    program, elements = _program(), 1
    for side in shape:
        elements *= side
    program.shared_bytes += elements * kind.itemsize
    _require(program.shared_bytes <= SHARED_MEMORY, f"{program.shared_bytes} bytes of shared memory")
    if layout == "barriers":
        return _Barriers(shape[0])
    return _Shared(torch.full(shape, torch.nan, dtype=kind), layout)


def _init(barrier: _Barrier, count: int) -> None:
    _require(barrier.count == 0, "a barrier was initialized twice")
    barrier.count = barrier.pending = count


def _wait(barrier: _Barrier, phase: int) -> None:
    _program().pause(f"phase {phase} of a barrier in {barrier.phase}", lambda: barrier.phase & 1 != phase)


def _arrive(barrier: _Barrier, count: int = 1) -> None:
    barrier.arrive(count)
    _program().pause("its turn after an arrival")


def _copy_in(described: TensorDescriptor, where: list[int], barrier: _Barrier, buffer: _Shared) -> None:
    _require(
        buffer.data.shape == described.block_shape,
        f"a box {described.block_shape} copied to {tuple(buffer.data.shape)}",
    )
    _require(buffer.layout == described.layout, "a copy and its buffer must have one layout")
    of_tensor, of_box = described.parts(where)
    buffer.data.fill_(torch.nan)

    def land() -> None:
        buffer.data.zero_()
        buffer.data[of_box] = described.base[of_tensor]
        barrier.land(buffer.data.numel() * buffer.data.element_size())

    _program().copies.append(land)


def _copy_out(described: TensorDescriptor, where: list[int], buffer: _Shared) -> None:
    _require(buffer.data.data_ptr() not in _local.unfenced, "a TMA store reads shared memory written without a fence")
    _require(min(where) >= 0, f"a store begins before its tensor, at {where}: on a GPU that is an illegal instruction")
    of_tensor, of_box = described.parts(where)

    def store() -> None:
        described.base[of_tensor] = buffer.data[of_box]

    _local.stores.append(store)


def _store_wait(pendings: int) -> None:
    _program().pause("its turn before stores")
    while len(_local.stores) > pendings:
        _local.stores.pop(0)()


def _multiply(left: Any, right: _Shared, total: Tensor, *, use_acc: bool = True, is_async: bool = False) -> _Mma:
    _require(is_async, "the emulator supports asynchronous MMAs only")
    _require(left.dtype == right.dtype, "both operands of an MMA must have one dtype")
    mma = _Mma(left, right, total if use_acc else None)
    _local.mmas.append(mma)
    return mma


def _multiply_wait(num_outstanding: int, deps: tuple[Any, ...]) -> Any:
    _program().pause("its turn before MMAs")
    while len(_local.mmas) > num_outstanding:
        _local.mmas.pop(0).compute()
    values = [one.value if isinstance(one, _Mma) else one for one in deps]
    _require(all(value is not None for value in values), "an MMA is used before it was waited for")
    return values[0] if len(values) == 1 else tuple(values)


def _load(pointer: _Pointer, mask: bool, other: int) -> int:
    if not mask:
        return other
    _require(0 <= pointer.at < pointer.tensor.numel(), "a load beyond its tensor")
    return int(pointer.tensor.reshape(-1)[pointer.at])


def _store(pointer: _Pointer, value: Tensor, mask: Tensor) -> None:
    flat = pointer.tensor.as_strided(
        (pointer.tensor.untyped_storage().nbytes() // pointer.tensor.element_size(),), (1,), 0
    )
    mask = mask.expand(pointer.at.shape)
    at = pointer.tensor.storage_offset() + pointer.at[mask]
    _require(bool(((at >= 0) & (at < len(flat))).all()), "a store beyond its tensor")
    flat[at] = value[mask].to(flat.dtype)


def _fence() -> None:
    _local.unfenced.clear()


def _scalar_or_tensor(scalar: Callable[..., Any], tensors: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: (tensors if any(isinstance(one, Tensor) for one in given) else scalar)(*given)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else yes if condition else no


def _modules(seed: Callable[[], int]) -> dict[str, ModuleType]:
    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        _require(
            options.keys() <= {"do_not_specialize", "do_not_specialize_on_alignment"},
            f"the emulator does not support the options {options}",
        )
        return (lambda inner: _Function(inner, seed)) if function is None else _Function(function, seed)

    layouts = ("NVMMADistributedLayout", "DotOperandLayout", "SliceLayout", "BlockedLayout")
    language = {
        **{name: lambda *given, name=name: (name, *given) for name in layouts},
        "NVMMASharedLayout": SimpleNamespace,
        "constexpr": lambda value: value,
        "float32": torch.float32,
        "int64": torch.int64,
        "arange": lambda start, end, _layout: torch.arange(start, end),
        "zeros": lambda shape, kind, _layout: torch.zeros(shape, dtype=kind),
        "where": _where,
        "max": lambda value, axis: value.amax(axis),
        "sum": lambda value, axis: value.sum(axis),
        "maximum": _scalar_or_tensor(max, torch.maximum),
        "exp2": torch.exp2,
        "log2": torch.log2,
        "convert_layout": lambda value, _layout: value,
        "static_range": range,
        "program_id": lambda _axis: _program().number,
        "num_programs": lambda _axis: _program().programs,
        "allocate_shared_memory": _allocate,
        "load": _load,
        "store": _store,
        "warp_specialize": lambda partitions, _warps, _registers: _program().specialize(partitions),
    }
    barriers = {
        "MBarrierLayout": lambda: "barriers",
        "init": _init,
        "wait": _wait,
        "arrive": _arrive,
        "expect": lambda barrier, expected: barrier.arrive(1, expected),
    }
    copies = {
        "async_copy_global_to_shared": _copy_in,
        "async_copy_shared_to_global": _copy_out,
        "store_wait": _store_wait,
    }
    hopper = {
        "fence_async_shared": _fence,
        "mbarrier": SimpleNamespace(**barriers),
        "tma": SimpleNamespace(**copies),
        "warpgroup_mma": _multiply,
        "warpgroup_mma_wait": _multiply_wait,
    }
    named: dict[str, dict[str, Any]] = {
        "gluon": {"jit": jit},
        "gluon.language": language,
        "gluon.language.nvidia": {},
        "gluon.language.nvidia.hopper": hopper,
        "gluon.nvidia": {},
        "gluon.nvidia.hopper": {"TensorDescriptor": TensorDescriptor},
    }
    made = {}
    for name, content in named.items():
        made[f"triton.experimental.{name}"] = module = ModuleType(name)
        vars(module).update(content)
    for outer, inner in pairwise(("gluon", "gluon.language")):
        setattr(made[f"triton.experimental.{outer}"], inner.rpartition(".")[2], made[f"triton.experimental.{inner}"])
    return made


@contextmanager
def emulated(kernel: str, *, seed: int = 0, line: str = "", instead: str = "") -> Iterator[None]:
    """
    Run a kernel in the emulator.

    Args:
        kernel: The name of its module, which is imported anew.
        seed: Seed of the random choices.
        line: Text of the module that is replaced.
        instead: The replacement.

    Raises:
        LookupError: The module has no such text.
    """
    drawn, before = random.Random(seed), sys.modules.get(kernel)
    try:
        sys.modules[kernel] = _imported(kernel, _modules(lambda: drawn.randrange(2**32)), line, instead)
        yield
    finally:
        sys.modules.pop(kernel, None)
        if before is not None:
            sys.modules[kernel] = before


def _imported(kernel: str, emulator: dict[str, ModuleType], line: str, instead: str) -> ModuleType:
    """Import a module with the emulator in place of Gluon. Triton's own imports of Gluon get the real one."""
    file = Path(str(getattr(find_spec(kernel), "origin", None)))
    source = file.read_text("utf-8")
    if line not in source:
        raise LookupError(f"{kernel} has no {line!r}")
    module = ModuleType(kernel)
    experimental = import_module("triton.experimental")
    gluon = emulator["triton.experimental.gluon"]
    with patch.dict(sys.modules, emulator), patch.object(experimental, "gluon", gluon, create=True):
        exec(compile(source.replace(line, instead, 1), file, "exec"), vars(module))  # noqa: S102 - with a change
    return module
