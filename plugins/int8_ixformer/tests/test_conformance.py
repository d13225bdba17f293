"""The conformance kit on the fake of ixformer, and on level 0 with an inner backend."""

from __future__ import annotations

import pytest

from attnplug_int8_ixformer.inner import CALIBRATE
from attnplug_kit.conformance import Basic, Batches, Conformance
from plugins.int8_ixformer.tests.conftest import FAKE


@pytest.mark.usefixtures("fakes")
class TestBasic(Basic, Batches):
    backend = f"{FAKE}/ixformer"
    device = "cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
class TestAll(Conformance):
    backend = f"{FAKE}/ixformer"
    device = "cpu"


@pytest.mark.usefixtures("fakes")  # registers the plugin; level 0 does not call the library
class TestCalibrationBasic(Basic, Batches):
    backend = f"{FAKE}/calibration"
    device = "cpu"
    features = (CALIBRATE,)


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
class TestCalibration(Conformance):
    backend = f"{FAKE}/calibration"
    device = "cpu"
    features = (CALIBRATE,)
