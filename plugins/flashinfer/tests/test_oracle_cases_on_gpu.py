"""Every line of what the plugin attends, on FlashInfer itself."""

from __future__ import annotations

import pytest

from plugins.flashinfer.tests.oracle_cases import SERVED, check_attended

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("variant", "name"), SERVED)
def test_output_and_lse_are_the_oracles(load_real, variant: str, name: str) -> None:
    check_attended(load_real, variant, name)
