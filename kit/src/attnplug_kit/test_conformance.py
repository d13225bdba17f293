"""
The kit as pytest collects it: ``pytest --pyargs attnplug_kit --attn-backend=NAME[/variant]``.

One class for each tier, so that ``-k TestBasic`` runs that one alone.
"""

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


class TestBasic(Basic):
    """`Basic`, of the backend that the command line names."""


class TestCapabilities(Capabilities):
    """`Capabilities`, of the backend that the command line names."""


class TestRefusals(Refusals):
    """`Refusals`, of the backend that the command line names."""


class TestListening(InputSensitivity):
    """`InputSensitivity`, of the backend that the command line names."""


class TestCacheWrites(CacheWrites):
    """`CacheWrites`, of the backend that the command line names."""


class TestLogSumExp(LogSumExp):
    """`LogSumExp`, of the backend that the command line names."""


class TestBuilding(Building):
    """`Building`, of the backend that the command line names."""


class TestStepping(Stepping):
    """`Stepping`, of the backend that the command line names."""


class TestGraphs(Graphs):
    """`Graphs`, of the backend that the command line names."""


class TestPurity(Purity):
    """`Purity`, of the backend that the command line names."""
