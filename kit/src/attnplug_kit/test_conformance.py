"""
The kit as pytest collects it: ``pytest --pyargs attnplug_kit --attn-backend=NAME[/variant]``.

One class for each tier, so that ``-k TestBasic`` runs that one alone.
"""

from __future__ import annotations

from attnplug_kit.conformance import (
    Basic,
    Batches,
    Building,
    CacheWrites,
    Capabilities,
    Graphs,
    InputSensitivity,
    LateValues,
    LogSumExp,
    Models,
    Purity,
    Refusals,
    Stepping,
)


class TestBasic(Basic):
    """`Basic`, for the backend of the command line."""


class TestBatches(Batches):
    """`Batches`, for the backend of the command line."""


class TestCapabilities(Capabilities):
    """`Capabilities`, for the backend of the command line."""


class TestModels(Models):
    """`Models`, for the backend of the command line."""


class TestRefusals(Refusals):
    """`Refusals`, for the backend of the command line."""


class TestInputSensitivity(InputSensitivity):
    """`InputSensitivity`, for the backend of the command line."""


class TestCacheWrites(CacheWrites):
    """`CacheWrites`, for the backend of the command line."""


class TestLogSumExp(LogSumExp):
    """`LogSumExp`, for the backend of the command line."""


class TestBuilding(Building):
    """`Building`, for the backend of the command line."""


class TestStepping(Stepping):
    """`Stepping`, for the backend of the command line."""


class TestGraphs(Graphs):
    """`Graphs`, for the backend of the command line."""


class TestLateValues(LateValues):
    """`LateValues`, for the backend of the command line."""


class TestPurity(Purity):
    """`Purity`, for the backend of the command line."""
