"""
A pytest plugin that records what tests show of a feature in vLLM, for `docs/reference/vllm-matrix.md`.

A test, or a parameter of it, names features by ``@pytest.mark.feature("soft cap", "sinks")``. ``kind=`` says what it
runs, where that is neither a whole engine (`needs_engine`, `gpu`) nor hand-made steps. ``--feature-report FILE`` writes
the results into a file that has the runs of other versions and devices, too: a run replaces its own part only.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections import Counter, defaultdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from packaging.version import Version

from tools.evidence import revision
from tools.vllm_matrix import FEATURES, KINDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

OPTION: Final = "--feature-report"
ENGINE_MARKERS: Final = ("needs_engine", "gpu")
REFERENCE: Final = "reference"
"""The kind of a test that runs vLLM's own attention: it is recorded nowhere."""

# The reasons of tests that are skipped because this version of vLLM lacks what they are about.
_NOT_IN_VERSION: Final = re.compile(r"(Skipped: )?(requires vLLM |this version of vLLM )")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--feature-report``."""
    parser.addoption(OPTION, metavar="FILE", type=Path, help="write which features of vLLM the tests showed")


def pytest_configure(config: pytest.Config) -> None:
    """Collect results where the command line requests a file."""
    path = config.getoption(OPTION)
    if path is not None:
        config.pluginmanager.register(Recorder(path), "vllm-features")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Check the features of all tests.

    Raises:
        UsageError: A test names a feature or a kind that the matrix has not.
    """
    for item in items:
        list(features_of(item))


def features_of(item: pytest.Item) -> Iterator[tuple[str, str]]:
    """
    Yield each feature that a test shows, with the kind of test that it is.

    Raises:
        UsageError: A feature or a kind that the matrix has not.
    """
    markers = list(item.iter_markers("feature"))
    if any(marker.kwargs.get("kind") == REFERENCE for marker in markers):
        return
    usual = "engine" if any(item.get_closest_marker(name) for name in ENGINE_MARKERS) else "steps"
    for marker in markers:
        kind = marker.kwargs.get("kind", usual)
        for name in marker.args:
            if name not in FEATURES or kind not in KINDS:
                raise pytest.UsageError(
                    f"{item.nodeid} names the feature {name!r} of the kind {kind!r}. Features and kinds are those of "
                    "tools/vllm_matrix.py; add the feature there."
                )
            yield name, kind


class Recorder:
    """Gathers the outcomes of one run and puts them into the file when it ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.features: dict[str, list[tuple[str, str]]] = {}
        self.outcomes: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Keep which features each test shows."""
        self.features = {item.nodeid: found for item in session.items if (found := list(features_of(item)))}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the outcome of each test, of the call or of what came before it."""
        if report.nodeid in self.features and (report.when == "call" or not report.passed):
            self.outcomes[report.nodeid] = _outcome(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the file; a run without a result leaves it alone."""
        if self.outcomes:
            run = described(session.config.invocation_params.args) | {"results": list(self.results())}
            write(self.path, [run])

    def results(self) -> Iterator[dict[str, Any]]:
        """Yield for each feature, kind and test function how many cases had each outcome."""
        counts: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
        for test, outcome in self.outcomes.items():
            for name, kind in self.features[test]:
                counts[name, kind, test.partition("[")[0]][outcome] += 1
        for (name, kind, test), found in sorted(counts.items()):
            yield {"feature": name, "kind": kind, "test": test, **dict(sorted(found.items()))}


def _outcome(report: pytest.TestReport) -> str:
    """Return passed, failed, skipped, or "absent": not in this version of vLLM."""
    if not report.skipped or not isinstance(report.longrepr, tuple):
        return report.outcome
    return "absent" if _NOT_IN_VERSION.match(str(report.longrepr[2])) else "skipped"


def described(arguments: Iterable[str]) -> dict[str, Any]:
    """Return what a run depends on: vLLM, device, versions, revision, command."""
    command = [
        argument for argument in arguments if not argument.startswith(OPTION) and Path(argument).suffix != ".json"
    ]
    packages = ("torch", "transformers")
    return {
        "vllm": _version(),
        "device": _device(),
        "versions": {"Python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
        "revision": revision(),
        "command": " ".join(["pytest", *command]),
    }


def _version() -> str:
    """Return the version of the vLLM that ran, which another process may have imported."""
    if "vllm" in sys.modules:
        return Version(sys.modules["vllm"].__version__).base_version
    from attnplug_vllm.versions import installed_version  # noqa: PLC0415 - of the environment of vLLM

    return str(installed_version())


def _device() -> str:
    import torch  # noqa: PLC0415 - runs without a report pay nothing for it

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else "CPU"


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file; none where it does not exist."""
    return list(json.loads(path.read_text("utf-8"))["runs"]) if path.exists() else []


def write(path: Path, runs: Iterable[Mapping[str, Any]]) -> None:
    """Put runs into a file, each in place of the one of the same version and device. A result is one line."""
    found = {(run["vllm"], run["device"]): run for run in [*read(path), *runs]}
    ordered = [found[key] for key in sorted(found, key=lambda key: (key[1], Version(key[0])))]
    texts = []
    for run in ordered:
        lines = ",\n".join(f"    {json.dumps(result)}" for result in run["results"])
        head = json.dumps({name: value for name, value in run.items() if name != "results"})
        texts.append(f'  {head[:-1]}, "results": [\n{lines}\n  ]}}')
    path.write_text('{"runs": [\n' + ",\n".join(texts) + "\n]}\n", encoding="utf-8")
