"""Requests compared with the oracle, on FlashInfer itself."""

from __future__ import annotations

import pytest

from plugins.flashinfer.tests.oracle_cases import SERVED, check_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("variant", "name"), SERVED)
def test_output_and_lse_match_the_oracle(load_real, variant: str, name: str) -> None:
    check_case(load_real, variant, name)
