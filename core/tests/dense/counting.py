"""What a repeated call costs the host, as numbers that are the same in every run."""

from __future__ import annotations

from core.tests.contract.world import at_most, calls_of, operations_of


def assert_costs_at_most(call, python_calls, operations):
    """Check the Python functions that a repeated call enters, and the operations of torch that it runs."""
    for _ in range(3):
        call()
    at_most(calls_of(call)[0], python_calls)
    at_most(operations_of(call), operations)
