"""
A double of Gluon, Triton's language of warps and shared memory: it runs kernels on a CPU, and no interpreter does.

Each partition of a program is a thread; one runs at a time, and whose turn is next is drawn wherever a barrier or a
product is waited for, and wherever a thread arrives. Everything asynchronous is as late as it may be: a copy lands when
nobody could go on without it, or when that is drawn, and until then its place is NaN; a product reads its operands when
it is waited for, a store when it is. So whoever reads too early, or gives a place back too early, computes NaN or
something else.

What a GPU would take in silence is refused: arrivals that nobody counts, copies that nobody expects, threads that wait
for each other, values that are used before they were waited for, stores that other units may not see, and more shared
memory than there is.
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
"""Bytes that a program may have on compute capability 9.0."""

_local = threading.local()


class MisuseError(AssertionError):
    """What a kernel may not do."""


def _need(truth: object, complaint: str) -> None:
    if not truth:
        raise MisuseError(complaint)


class _StoppedError(Exception):
    """Another partition has failed."""


class _Program:
    """One program: its partitions, one of which runs at a time, and what is under way."""

    def __init__(self, number: int, programs: int, seed: int) -> None:
        self.number, self.programs, self.random = number, programs, random.Random(seed)
        self.copies: list[Callable[[], None]] = []
        self.shared_bytes = 0
        self.failure: BaseException | None = None
        self._waits: list[tuple[str, Callable[[], bool]] | None] = []
        self._gates: list[threading.Semaphore] = []

    def specialize(self, partitions: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        self._waits = [("the beginning", lambda: True)] * len(partitions)
        self._gates = [threading.Semaphore(0) for _ in partitions]
        threads = [threading.Thread(target=self._run, args=(at, *partition)) for at, partition in enumerate(partitions)]
        for thread in threads:
            thread.start()
        self._gates[self._next()].release()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        _need(not self.copies, "copies were under way when the program ended")

    def _run(self, at: int, partition: Callable[..., None], given: tuple[Any, ...]) -> None:
        _local.at, _local.program, _local.products, _local.stores, _local.unseen = at, self, [], [], set()
        try:
            self._enter(at)
            partition(*given)
            _need(not _local.stores, "a store was under way when its partition ended")
            _need(not _local.products, "a product was never waited for")
        except _StoppedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by whoever launched
            self.failure = self.failure or error
        finally:
            self._waits[at] = None
            self._hand_over()

    def pause(self, what: str, ready: Callable[[], bool] = lambda: True) -> None:
        """Let somebody go on, perhaps whoever calls, once it can."""
        at = _local.at
        self._waits[at] = (what, ready)
        if self._hand_over(at):
            self._enter(at)

    def _enter(self, at: int) -> None:
        self._gates[at].acquire()
        if self.failure is not None:
            raise _StoppedError

    def _hand_over(self, at: int = -1) -> bool:
        """Let whoever is drawn go on, unless it is who asks: one thread runs at a time, so nothing has to be locked."""
        following = self._next()
        if self.failure is not None:
            for gate in self._gates:
                gate.release()
        elif following not in {at, -1}:
            self._gates[following].release()
        return following != at

    def _next(self) -> int:
        able = self._able()
        while self.copies and (not able or self.random.random() < 0.1):
            self.copies.pop(self.random.randrange(len(self.copies)))()
            able = self._able()
        waiting = [f"{at} for {wait[0]}" for at, wait in enumerate(self._waits) if wait is not None]
        if waiting and not able and self.failure is None:
            self.failure = MisuseError(f"all partitions wait: {', '.join(waiting)}")
        return self.random.choice(able) if able else -1

    def _able(self) -> list[int]:
        return [at for at, wait in enumerate(self._waits) if wait is not None and wait[1]()]


def _program() -> _Program:
    return _local.program


class _Barrier:
    """Counts arrivals and bytes; a phase ends when both have come."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        _need(self.count, "a barrier was used before it was made")
        _need(self.pending >= count, f"more than {self.count} arrivals in one phase of a barrier")
        self.pending -= count
        self.bytes += expected
        self._end()

    def land(self, count: int) -> None:
        _need(self.bytes >= count, "more bytes came than a barrier expects")
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
        _need(0 <= at < len(self._all), f"there is no barrier {at}")
        return self._all[at]


class _Shared:
    """A place in shared memory."""

    def __init__(self, data: Tensor, layout: Any) -> None:
        self.data, self.layout = data, layout

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, at: int) -> _Shared:
        _need(0 <= at < len(self.data), f"there is no place {at}")
        return _Shared(self.data[at], self.layout)

    def reshape(self, shape: list[int]) -> _Shared:
        return _Shared(self.data.view(shape), self.layout)

    def permute(self, order: tuple[int, ...]) -> _Shared:
        return _Shared(self.data.permute(order), self.layout)

    def load(self, layout: Any) -> Tensor:
        _need(layout is not None, "registers have a layout")
        return self.data.clone()

    def store(self, value: Tensor) -> None:
        _need(value.shape == self.data.shape, f"{tuple(value.shape)} stored to {tuple(self.data.shape)}")
        self.data.copy_(value)
        _local.unseen.add(self.data.data_ptr())


class _Product:
    """A product of matrices that is computed when it is waited for."""

    def __init__(self, left: Any, right: _Shared, total: Any) -> None:
        _need(isinstance(right, _Shared), "the right side of a product is in shared memory")
        _need(not isinstance(total, _Product), "a product is added to one that nobody has waited for")
        self.left, self.right, self.total = left, right, total
        self.value: Tensor | None = None

    def compute(self) -> None:
        unseen = self.right.data.data_ptr() in _local.unseen
        _need(not unseen, "a product of what its unit does not see yet: a fence is missing")
        left = self.left.data if isinstance(self.left, _Shared) else self.left
        self.value = left.float() @ self.right.data.float()
        if self.total is not None:
            self.value += self.total


class _Pointer:
    """An address, or as many as numbers were added: places in a tensor, counted from its first number."""

    def __init__(self, tensor: Tensor, at: Any = 0) -> None:
        self.tensor, self.at = tensor, at

    def __add__(self, places: Any) -> _Pointer:
        return _Pointer(self.tensor, self.at + places)


class TensorDescriptor:
    """What copies know of a tensor: its shape, and how large a box they copy."""

    def __init__(self, tensor: Tensor, box: list[int], layout: Any) -> None:
        of_bytes = tensor.element_size()
        _need(tensor.data_ptr() % 16 == 0, "a described tensor begins at a multiple of 16 bytes")
        _need(all(stride * of_bytes % 16 == 0 for stride in tensor.stride()[:-1]), "strides are multiples of 16 bytes")
        _need(tensor.stride(-1) == 1, "the last numbers of a described tensor are neighbors")
        _need(len(box) == tensor.ndim and all(0 < side <= 256 for side in box), f"no box is {box}")
        _need(all(side & (side - 1) == 0 for side in box), f"sides of a box are powers of two, unlike {box}")
        _need(layout.swizzle_byte_width <= box[-1] * of_bytes, "rows of a box are too short to swizzle")
        self.base, self.block_shape, self.layout = tensor, tuple(box), layout

    from_tensor = classmethod(lambda cls, tensor, box, layout: cls(tensor, box, layout))

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def parts(self, where: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return which part of the tensor a box covers, and which part of the box that is: the rest is outside."""
        pairs = [
            (slice(max(at, 0), max(0, min(at + side, most))), at)
            for at, side, most in zip(where, self.block_shape, self.base.shape, strict=True)
        ]
        inside = tuple(part for part, _ in pairs)
        return inside, tuple(slice(part.start - at, max(part.start, part.stop) - at) for part, at in pairs)


# --- the language -----------------------------------------------------------------------------------------------------


class _Function:
    """What `gluon.jit` makes of a function: called in a kernel, or launched."""

    def __init__(self, function: Callable[..., Any], seed: Callable[[], int]) -> None:
        self.fn, self._seed = function, seed

    def __call__(self, *given: Any) -> Any:
        return self.fn(*given)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        (programs,) = grid

        def launch(*given: Any, num_warps: int, enable_fp_fusion: bool = True) -> None:
            _need(num_warps == 4, "products are computed by warpgroups of four warps")
            arguments = [_Pointer(one) if isinstance(one, Tensor) else one for one in given]
            for number in range(programs):
                _local.program = _Program(number, programs, self._seed())
                _local.unseen = set()
                self.fn(*arguments)

        return launch


def _allocate(kind: torch.dtype, shape: list[int], layout: Any) -> Any:
    program, numbers = _program(), 1
    for side in shape:
        numbers *= side
    program.shared_bytes += numbers * kind.itemsize
    _need(program.shared_bytes <= SHARED_MEMORY, f"{program.shared_bytes} bytes of shared memory")
    if layout == "barriers":
        return _Barriers(shape[0])
    return _Shared(torch.full(shape, torch.nan, dtype=kind), layout)


def _init(barrier: _Barrier, count: int) -> None:
    _need(barrier.count == 0, "a barrier was made twice")
    barrier.count = barrier.pending = count


def _wait(barrier: _Barrier, phase: int) -> None:
    _program().pause(f"phase {phase} of a barrier in {barrier.phase}", lambda: barrier.phase & 1 != phase)


def _arrive(barrier: _Barrier, count: int = 1) -> None:
    barrier.arrive(count)
    _program().pause("its turn after an arrival")


def _copy_in(described: TensorDescriptor, where: list[int], barrier: _Barrier, place: _Shared) -> None:
    _need(
        place.data.shape == described.block_shape, f"a box {described.block_shape} copied to {tuple(place.data.shape)}"
    )
    _need(place.layout == described.layout, "a copy swizzles as its place does")
    of_tensor, of_box = described.parts(where)
    place.data.fill_(torch.nan)

    def land() -> None:
        place.data.zero_()
        place.data[of_box] = described.base[of_tensor]
        barrier.land(place.data.numel() * place.data.element_size())

    _program().copies.append(land)


def _copy_out(described: TensorDescriptor, where: list[int], place: _Shared) -> None:
    _need(place.data.data_ptr() not in _local.unseen, "a store of what other units do not see yet: a fence is missing")
    _need(min(where) >= 0, f"a store begins before its tensor, at {where}: on a GPU that is an illegal instruction")
    of_tensor, of_box = described.parts(where)

    def store() -> None:
        described.base[of_tensor] = place.data[of_box]

    _local.stores.append(store)


def _store_wait(pendings: int) -> None:
    _program().pause("its turn before stores")
    while len(_local.stores) > pendings:
        _local.stores.pop(0)()


def _multiply(left: Any, right: _Shared, total: Tensor, *, use_acc: bool = True, is_async: bool = False) -> _Product:
    _need(is_async, "products are asynchronous here")
    _need(left.dtype == right.dtype, "both sides of a product are of one type")
    product = _Product(left, right, total if use_acc else None)
    _local.products.append(product)
    return product


def _multiply_wait(num_outstanding: int, deps: tuple[Any, ...]) -> Any:
    _program().pause("its turn before products")
    while len(_local.products) > num_outstanding:
        _local.products.pop(0).compute()
    values = [one.value if isinstance(one, _Product) else one for one in deps]
    _need(all(value is not None for value in values), "a product is used before it was waited for")
    return values[0] if len(values) == 1 else tuple(values)


def _load(place: _Pointer, mask: bool, other: int) -> int:
    if not mask:
        return other
    _need(0 <= place.at < place.tensor.numel(), "a load beyond its tensor")
    return int(place.tensor.reshape(-1)[place.at])


def _store(place: _Pointer, value: Tensor, mask: Tensor) -> None:
    flat = place.tensor.as_strided((place.tensor.untyped_storage().nbytes() // place.tensor.element_size(),), (1,), 0)
    mask = mask.expand(place.at.shape)
    at = place.tensor.storage_offset() + place.at[mask]
    _need(bool(((at >= 0) & (at < len(flat))).all()), "a store beyond its tensor")
    flat[at] = value[mask].to(flat.dtype)


def _fence() -> None:
    _local.unseen.clear()


def _of_numbers(scalar: Callable[..., Any], of_tensors: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: (of_tensors if any(isinstance(one, Tensor) for one in given) else scalar)(*given)


def _where(condition: Any, yes: Any, no: Any) -> Any:
    return torch.where(condition, yes, no) if isinstance(condition, Tensor) else yes if condition else no


def _modules(seed: Callable[[], int]) -> dict[str, ModuleType]:
    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        _need(
            options.keys() <= {"do_not_specialize", "do_not_specialize_on_alignment"}, f"the double knows no {options}"
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
        "maximum": _of_numbers(max, torch.maximum),
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
def doubled(kernel: str, *, seed: int = 0, line: str = "", instead: str = "") -> Iterator[None]:
    """
    Run a kernel by the double.

    Args:
        kernel: The name of its module, which is imported anew.
        seed: Of whose turn is next.
        line: Text of the module that is changed.
        instead: What it is changed to.

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


def _imported(kernel: str, doubles: dict[str, ModuleType], line: str, instead: str) -> ModuleType:
    """Import a module that sees the doubles. Triton, which imports Gluon by itself, does not."""
    file = Path(str(getattr(find_spec(kernel), "origin", None)))
    source = file.read_text("utf-8")
    if line not in source:
        raise LookupError(f"{kernel} has no {line!r}")
    module = ModuleType(kernel)
    experimental = import_module("triton.experimental")
    gluon = doubles["triton.experimental.gluon"]
    with patch.dict(sys.modules, doubles), patch.object(experimental, "gluon", gluon, create=True):
        exec(compile(source.replace(line, instead, 1), file, "exec"), vars(module))  # noqa: S102 - with a change
    return module
