"""The error against attention that rounds nothing stays inside its budget, and is the error of quantization."""

from __future__ import annotations

from plugins.int8_ixformer.tests.outliers import CONTEXTS, SIZES, table, text
from tests.backends.triton_on_cpu import MARKS

pytestmark = MARKS


def test_the_budget_is_met(record_property):
    errors = table()

    record_property("relative errors on activations with outlier channels", text(errors))
    assert len(errors) == 4 * len(SIZES) * len(CONTEXTS)
    assert [each for each in errors if not each.is_within] == []
    assert min(each.relative for each in errors) > 1e-3  # something is quantized, and somebody looks
