"""
The conformance kit: does a backend do what its manifest says, and refuse the rest?

    pytest --pyargs attnplug.testing --attn-backend=NAME[/variant] [--attn-report=DIR]

or, among the tests of a plugin,

    from attnplug.testing.kit import Conformance

    class TestMine(Conformance):
        backend = "mine/plain"

`Conformance` has all tiers; each is a class of its own that can be inherited alone.
"""

from attnplug.testing.kit.basic import Basic
from attnplug.testing.kit.building import Building
from attnplug.testing.kit.cache_writes import CacheWrites
from attnplug.testing.kit.capabilities import Capabilities
from attnplug.testing.kit.conformance import Conformance
from attnplug.testing.kit.graphs import Graphs
from attnplug.testing.kit.listening import Listening
from attnplug.testing.kit.log_sum_exp import LogSumExp
from attnplug.testing.kit.purity import Purity
from attnplug.testing.kit.refusals import Refusals
from attnplug.testing.kit.stepping import Stepping
from attnplug.testing.kit.tier import Tier

__all__ = [
    "Basic",
    "Building",
    "CacheWrites",
    "Capabilities",
    "Conformance",
    "Graphs",
    "Listening",
    "LogSumExp",
    "Purity",
    "Refusals",
    "Stepping",
    "Tier",
]
