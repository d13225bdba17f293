"""
The kit as pytest collects it: ``pytest --pyargs attnplug.testing --attn-backend=NAME[/variant]``.

One class for each tier, so that ``-k TestBasic`` runs that one alone.
"""

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


class TestBasic(Basic):
    """`Basic`, of the backend that the command line names."""


class TestCapabilities(Capabilities):
    """`Capabilities`, of the backend that the command line names."""


class TestRefusals(Refusals):
    """`Refusals`, of the backend that the command line names."""


class TestListening(Listening):
    """`Listening`, of the backend that the command line names."""


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
