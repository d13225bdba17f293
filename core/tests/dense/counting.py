"""What a call costs the host, as numbers that are the same in every run."""

from __future__ import annotations

import sys
from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


def assert_costs_at_most(call, python_calls, operations):
    """
    Count the Python functions that a repeated call enters, and the operations of torch that it runs.

    The message of a failure lists all of them.
    """
    for _ in range(3):
        call()
    entered, ran = _entered(call), _Operations()
    with ran:
        call()

    count = sum(entered.values())
    assert count <= python_calls, f"{count} Python calls, {python_calls} expected:\n{_listed(entered)}"
    assert len(ran.names) <= operations, f"{len(ran.names)} operations, {operations} expected: {ran.names}"


class _Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func).removeprefix("aten."))
        return func(*args, **(kwargs or {}))


def _entered(call):
    entered = Counter()

    def note(frame, event, _):
        if event == "call":
            code = frame.f_code
            entered[f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno} {code.co_name}"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


def _listed(entered):
    return "\n".join(f"{count} {name}" for name, count in sorted(entered.items()))
