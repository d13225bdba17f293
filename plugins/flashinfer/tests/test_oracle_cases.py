"""Requests compared with the oracle, on the fake."""

from __future__ import annotations

import pytest

from plugins.flashinfer.tests.oracle_cases import SERVED, check_case


@pytest.mark.parametrize(("variant", "name"), SERVED)
def test_output_and_lse_match_the_oracle(load_fake, variant: str, name: str) -> None:
    check_case(load_fake, variant, name)
