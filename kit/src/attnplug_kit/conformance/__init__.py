"""
The conformance kit: does a backend do what its manifest declares, and refuse the rest?

    pytest --pyargs attnplug_kit --attn-backend=NAME[/variant] [--attn-report=DIR]

or, among the tests of a plugin,

    from attnplug_kit.conformance import Conformance

    class TestMine(Conformance):
        backend = "mine/plain"

`Conformance` has all tiers; each is a class that can be inherited alone.
"""

from attnplug_kit.conformance.basic import Basic
from attnplug_kit.conformance.batches import Batches
from attnplug_kit.conformance.building import Building
from attnplug_kit.conformance.cache_writes import CacheWrites
from attnplug_kit.conformance.capabilities import Capabilities
from attnplug_kit.conformance.graphs import Graphs
from attnplug_kit.conformance.input_sensitivity import InputSensitivity
from attnplug_kit.conformance.late import LateValues
from attnplug_kit.conformance.log_sum_exp import LogSumExp
from attnplug_kit.conformance.models import Models
from attnplug_kit.conformance.purity import Purity
from attnplug_kit.conformance.refusals import Refusals
from attnplug_kit.conformance.stepping import Stepping
from attnplug_kit.conformance.tier import Tier

__all__ = [
    "Basic",
    "Batches",
    "Building",
    "CacheWrites",
    "Capabilities",
    "Conformance",
    "Graphs",
    "InputSensitivity",
    "LateValues",
    "LogSumExp",
    "Models",
    "Purity",
    "Refusals",
    "Stepping",
    "Tier",
]


class Conformance(  # pytest runs the tests of the last class first: the simplest ones
    Purity,
    LateValues,
    Graphs,
    Stepping,
    Building,
    LogSumExp,
    CacheWrites,
    InputSensitivity,
    Refusals,
    Models,
    Capabilities,
    Batches,
    Basic,
):
    """
    The whole kit: everything that a backend has to pass.

    class TestMine(Conformance):
        backend = "mine/plain"
    """
