"""The conformance kit on level 0: whoever asks for the calibration gets the attention of the inner backend."""

from __future__ import annotations

import pytest

from attnplug_int8_ixformer.inner import CALIBRATE
from attnplug_kit.conformance import Conformance
from plugins.int8_ixformer.tests.doubled import NAME


@pytest.mark.usefixtures("fakes")  # which offers the plugin to this process; level 0 calls nothing of the library
class TestCalibration(Conformance):
    backend = f"{NAME}/calibration"
    device = "cpu"
    features = (CALIBRATE,)
