"""Ranks of one group that run what a test sends them: threads of this process, or processes."""

from __future__ import annotations

import threading
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from torch import Tensor

    from attnplug.contract import Parallel

START_LIMIT: Final = 120.0
"""Seconds for a process to start: it imports torch, on a machine that may be busy."""

CALL_LIMIT: Final = 60.0
"""Seconds for a call to return. An exchange waits for the other ranks for half of them."""


class ThreadGroup:
    """
    A group of ranks that are threads.

    Args:
        size: Ranks.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._barrier = threading.Barrier(size, timeout=CALL_LIMIT)
        self._given: list[Any] = [None] * size

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what ``function(rank, group, *arguments)`` returns on each rank, or raise what it raises on one."""

        def run(rank: int) -> Any:
            try:
                return function(rank, self, *arguments)
            except BaseException:
                self._barrier.abort()  # the others wait for it
                raise

        with ThreadPoolExecutor(self._size) as threads:
            calls = [threads.submit(run, rank) for rank in range(self._size)]
        errors = [call.exception() for call in calls if call.exception() is not None]
        for error in sorted(errors, key=lambda one: isinstance(one, threading.BrokenBarrierError)):
            raise error
        return [call.result() for call in calls]

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks."""
        self._given[rank] = tensor
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found


class ThreadRanks:
    """What `attnplug.ops.Ranks` is, for a `ThreadGroup`."""

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        del device
        self.size, self.rank = parallel.dcp_size, parallel.dcp_rank
        self._group: Any = parallel.dcp_group

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._group.exchange(self.rank, tensor))

    def reduce_scatter(self, parts: Tensor, *, in_order: bool = False) -> Tensor:
        del in_order
        total, *others = (given[self.rank].clone() for given in self._group.exchange(self.rank, parts))
        for one in others:
            total += one
        return total


class ProcessGroup:
    """
    A group of ranks that are processes, started once, and a smaller group of the first ones for each size below.

    They meet through a file, so that no port is taken. When one fails, all end: the next data between them would belong
    to another call.

    Args:
        size: Processes.
        backend: Of torch.distributed; with ``"nccl"`` each process has the GPU of its rank.
        limit: Seconds for a call to return: more where kernels are compiled.
    """

    def __init__(self, size: int, backend: str = "gloo", limit: float = CALL_LIMIT) -> None:
        self.size = size
        self._limit = limit
        self._folder = TemporaryDirectory(prefix="attnplug-ranks-")
        context = mp.get_context("spawn")
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            store = str(Path(self._folder.name) / "store")
            process = context.Process(target=_serve, args=(rank, size, backend, store, limit, there), daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self._processes.append(process)
        self._results(range(size), START_LIMIT)

    def call(self, function: Callable[..., Any], *arguments: Any, size: int | None = None) -> list[Any]:
        """
        Return what ``function(rank, group, *arguments)`` returns on each of the first `size` processes.

        Raises:
            AssertionError: One failed, or did not return in time; its traceback is the message.
        """
        ranks = range(self.size if size is None else size)
        for rank in ranks:
            self._ends[rank].send((function, len(ranks), arguments))
        return self._results(ranks, self._limit)

    @property
    def live(self) -> bool:
        """Whether no call has failed."""
        return bool(self._ends)

    def close(self, patience: float = 10.0) -> None:
        """End the processes, by force where they have not ended after so many seconds."""
        for end in self._ends:
            end.close()
        self._ends = []
        for process in self._processes:
            process.join(patience)
            process.kill()
            process.join()
        self._folder.cleanup()

    def _results(self, ranks: range, limit: float) -> list[Any]:
        deadline, found = time.monotonic() + limit, dict[int, Any]()
        while len(found) < len(ranks):
            pending = {self._ends[rank]: rank for rank in ranks if rank not in found}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            for end in ready:
                found[pending[end]] = self._result(end, pending[end])
            if not ready:
                self._fail(f"ranks {sorted(pending.values())} did not return within {limit} s")
        return [found[rank] for rank in ranks]

    def _result(self, end: Connection, rank: int) -> Any:
        try:
            passed, result = end.recv()
        except (EOFError, ConnectionError):
            passed, result = False, "it has ended"
        if not passed:
            self._fail(f"rank {rank}: {result}")
        return result

    def _fail(self, message: str) -> NoReturn:
        """End all at once: the others wait for the one that failed."""
        self.close(patience=0.0)
        raise AssertionError(message)


def _serve(rank: int, size: int, backend: str, store: str, seconds: float, end: Connection) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is None:
        warnings.simplefilter("error")
    else:
        torch.cuda.set_device(device)
    limit = timedelta(seconds=seconds / 2)
    meeting = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size, "device_id": device}
    dist.init_process_group(backend, timeout=limit, **meeting)
    groups = {count: dist.new_group(list(range(count)), timeout=limit) for count in range(2, size + 1)}
    end.send((True, None))
    while (task := _next(end)) is not None:
        function, count, arguments = task
        try:
            result = (True, function(rank, groups[count], *arguments))
        except Exception:  # noqa: BLE001 - whatever it is, the test reports it
            result = (False, traceback.format_exc())
        with suppress(ConnectionError):  # the test has ended
            end.send(result)
    dist.destroy_process_group()


def _next(end: Connection) -> Any:
    """Return what the test sends; None where it has closed its end."""
    try:
        return end.recv()
    except (EOFError, ConnectionError):
        return None
