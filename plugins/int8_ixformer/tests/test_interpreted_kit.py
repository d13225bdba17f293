"""The conformance kit on a CPU, interpreted."""

from __future__ import annotations

from plugins.int8_ixformer.tests.interpreting import check


def test_what_is_declared_is_served_and_the_rest_is_refused():
    check("interpreted_conformance.py", measured=False)
