"""The conformance kit on the fake of ixformer, and on level 0 with an inner backend."""

from __future__ import annotations

import pytest

from attnplug_int8_ixformer.inner import CALIBRATE
from attnplug_kit.conformance import Basic, Conformance
from plugins.int8_ixformer.tests.conftest import FAKE


@pytest.mark.usefixtures("fakes")
class TestBasic(Basic):
    backend = f"{FAKE}/ixformer"
    device = "cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
class TestAll(Conformance):
    backend = f"{FAKE}/ixformer"
    device = "cpu"


@pytest.mark.usefixtures("fakes")  # registers the plugin; level 0 does not call the library
class TestCalibrationBasic(Basic):
    backend = f"{FAKE}/calibration"
    device = "cpu"
    features = (CALIBRATE,)


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
class TestCalibration(Conformance):
    backend = f"{FAKE}/calibration"
    device = "cpu"
    features = (CALIBRATE,)
