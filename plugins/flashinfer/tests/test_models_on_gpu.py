"""The engine generates with models of real shapes through the plugin, compared with transformers alone."""

from __future__ import annotations

import pytest

from plugins.flashinfer.tests.real import FLASHINFER
from tests.backends.accuracy import FAULTS, check_accuracy, free_models
from tests.backends.models import NAMES

pytestmark = pytest.mark.gpu

measure = FLASHINFER.accuracy_fixture()


@pytest.fixture(scope="module", autouse=True)
def _free_models():
    yield
    free_models()


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("variant", ["flashinfer/fa3", "flashinfer/fa2"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_match_the_model_alone(measure, record_property, name: str, variant: str, graphs: bool) -> None:
    check_accuracy(measure(name, variant.rpartition("/")[2], graphs=graphs), record_property)


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_injected_faults_are_found(measure, monkeypatch, name: str, fault) -> None:
    fault(monkeypatch)

    accuracy = measure(name, "fa2", graphs=False)

    with pytest.raises(AssertionError, match="Accuracy"):
        accuracy.check()
