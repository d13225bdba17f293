"""The whole kit as one class."""

from __future__ import annotations

from attnplug_kit.conformance.basic import Basic
from attnplug_kit.conformance.building import Building
from attnplug_kit.conformance.cache_writes import CacheWrites
from attnplug_kit.conformance.capabilities import Capabilities
from attnplug_kit.conformance.graphs import Graphs
from attnplug_kit.conformance.input_sensitivity import InputSensitivity
from attnplug_kit.conformance.log_sum_exp import LogSumExp
from attnplug_kit.conformance.purity import Purity
from attnplug_kit.conformance.refusals import Refusals
from attnplug_kit.conformance.stepping import Stepping


class Conformance(
    Basic, Capabilities, Refusals, InputSensitivity, CacheWrites, LogSumExp, Building, Stepping, Graphs, Purity
):
    """
    Everything that a backend has to pass.

        class TestMine(Conformance):
            backend = "mine/plain"
    """
