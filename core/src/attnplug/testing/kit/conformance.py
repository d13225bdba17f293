"""The whole kit as one class."""

from __future__ import annotations

from attnplug.testing.kit.basic import Basic
from attnplug.testing.kit.building import Building
from attnplug.testing.kit.cache_writes import CacheWrites
from attnplug.testing.kit.capabilities import Capabilities
from attnplug.testing.kit.graphs import Graphs
from attnplug.testing.kit.listening import Listening
from attnplug.testing.kit.log_sum_exp import LogSumExp
from attnplug.testing.kit.purity import Purity
from attnplug.testing.kit.refusals import Refusals
from attnplug.testing.kit.stepping import Stepping


class Conformance(Basic, Capabilities, Refusals, Listening, CacheWrites, LogSumExp, Building, Stepping, Graphs, Purity):
    """
    Everything that a backend has to pass.

        class TestMine(Conformance):
            backend = "mine/plain"
    """
