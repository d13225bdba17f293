"""Every line of what the plugin attends, on the fake."""

from __future__ import annotations

import pytest

from plugins.flashinfer.tests.oracle_cases import SERVED, check_attended


@pytest.mark.parametrize(("variant", "name"), SERVED)
def test_output_and_lse_are_the_oracles(load_fake, variant: str, name: str) -> None:
    check_attended(load_fake, variant, name)
