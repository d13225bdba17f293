"""Processes of one group, started once, that do what a test sends them."""

from __future__ import annotations

import time
import traceback
import warnings
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

START_LIMIT: Final = 120.0
"""Seconds in which a process has to come up: it imports torch, on a machine that may be busy."""

ANSWER_LIMIT: Final = 60.0
"""Seconds in which a process has to answer; half of them in which the others have to come to an exchange."""


class Processes:
    """
    The ranks of a group, and of a smaller group of the first ones for each size below.

    They meet through a file, so that no port is taken. When one fails, all end: what they would send each other next
    belongs to another call.

    Args:
        size: Processes.
        backend: Of torch.distributed; with ``"nccl"`` each process has the GPU of its rank.
        limit: Seconds in which a process has to answer: more where kernels are compiled.
    """

    def __init__(self, size: int, backend: str = "gloo", limit: float = ANSWER_LIMIT) -> None:
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
        self._answers(range(size), START_LIMIT)

    def call(self, function: Callable[..., Any], *arguments: Any, size: int | None = None) -> list[Any]:
        """
        Return what ``function(rank, group, *arguments)`` returns on each of the first `size` processes.

        Raises:
            AssertionError: One failed, or did not answer in time; its traceback is the message.
        """
        ranks = range(self.size if size is None else size)
        for rank in ranks:
            self._ends[rank].send((function, len(ranks), arguments))
        return self._answers(ranks, self._limit)

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

    def _answers(self, ranks: range, limit: float) -> list[Any]:
        deadline, found = time.monotonic() + limit, dict[int, Any]()
        while len(found) < len(ranks):
            pending = {self._ends[rank]: rank for rank in ranks if rank not in found}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            for end in ready:
                found[pending[end]] = self._answer(end, pending[end])
            if not ready:
                self._fail(f"ranks {sorted(pending.values())} did not answer within {limit} s")
        return [found[rank] for rank in ranks]

    def _answer(self, end: Connection, rank: int) -> Any:
        try:
            fine, answer = end.recv()
        except (EOFError, ConnectionError):
            fine, answer = False, "it has ended"
        if not fine:
            self._fail(f"rank {rank}: {answer}")
        return answer

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
    while (asked := _next(end)) is not None:
        function, count, arguments = asked
        try:
            answer = (True, function(rank, groups[count], *arguments))
        except Exception:  # noqa: BLE001 - whatever it is, the test has to hear of it
            answer = (False, traceback.format_exc())
        with suppress(ConnectionError):  # the test has given up
            end.send(answer)
    dist.destroy_process_group()


def _next(end: Connection) -> Any:
    """Return what the test sends, None where it has closed its end."""
    try:
        return end.recv()
    except (EOFError, ConnectionError):
        return None
