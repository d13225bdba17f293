"""The conformance kit on a CPU, interpreted, in two processes; without the one test that takes the interpreter long."""

from __future__ import annotations

import pytest

from plugins.int8_ixformer.tests.interpreting import check

VALUES = "test_capability or test_pairs"


@pytest.mark.parametrize("which", [VALUES, f"not ({VALUES} or test_many_requests)"])
def test_what_is_declared_is_served_and_the_rest_is_refused(which):
    check("interpreted_conformance.py", "-k", which, measured=False)
