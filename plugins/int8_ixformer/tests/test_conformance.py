"""The conformance kit on the fake of ixformer, and on level 0 with an inner backend."""

from __future__ import annotations

import pytest

from attnplug_int8_ixformer.inner import CALIBRATE
from attnplug_kit.conformance import Basic, Batches, Conformance, Models
from plugins.int8_ixformer.tests.conftest import FAKE

# But `Models`: a fake has no kernel that could be wrong after thousands of tokens, and takes minutes for them.
ALL_TIERS = tuple(tier for tier in Conformance.__bases__ if tier is not Models)


@pytest.mark.usefixtures("fakes")
class TestBasic(Basic, Batches):
    backend = f"{FAKE}/ixformer"
    device = "cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
class TestAll(*ALL_TIERS):
    backend = f"{FAKE}/ixformer"
    device = "cpu"


@pytest.mark.usefixtures("fakes")  # registers the plugin; level 0 does not call the library
class TestCalibrationBasic(Basic, Batches):
    backend = f"{FAKE}/calibration"
    device = "cpu"
    features = (CALIBRATE,)


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
class TestCalibration(*ALL_TIERS):
    backend = f"{FAKE}/calibration"
    device = "cpu"
    features = (CALIBRATE,)
