"""What every test run shares: reproducible randomness, the hypothesis profile, and why GPU tests did not run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from zlib import crc32

import hypothesis
import pytest

from tests.examples import CI, SCALE, examples

if TYPE_CHECKING:
    from collections.abc import Generator

pytest_plugins = ["tools.cpu_times", "tools.evidence", "tools.vllm_results"]

# No deadline: the first example of a test may pay for a compiler or a cold import.
# CI repeats one run exactly; a developer's runs explore, and so does `make test-all`.
hypothesis.settings.register_profile(
    "attnplug",
    deadline=None,
    max_examples=examples(100),
    derandomize=CI and SCALE <= 1,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # a shared machine of two cores is slow now and then
)
hypothesis.settings.load_profile("attnplug")

_ROOT = Path(__file__).parent  # programs of tests run pytest below other folders
_DESELECTED = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Hide the developer's own settings of attnplug from every test, and from every process that a test starts."""
    for name in [name for name in os.environ if name.startswith("ATTNPLUG_")]:
        del os.environ[name]
    for name in (
        "COLUMNS",
        "LINES",
    ):  # of a terminal, or of pytest-xdist: what is piped has 100
        os.environ.pop(name, None)
    os.environ["XDG_CONFIG_HOME"] = str(config.rootpath / ".pytest_cache" / "no-configuration")
    if config.pluginmanager.hasplugin("xdist"):
        _let_workers_write_coverage()


def _let_workers_write_coverage() -> None:
    """Give workers two minutes to end: they write what coverage has measured, which took 10 s on a busy machine."""
    from xdist.workermanage import NodeManager  # noqa: PLC0415 - some environments of the tests have no xdist

    NodeManager.EXIT_TIMEOUT = 120


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let coverage leave tests out, with their fixtures and the processes that they start."""
    measuring = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if measuring is None or _is_measured(item):
        return (yield)
    with pytest.MonkeyPatch.context() as environment:
        for name in [name for name in os.environ if name.startswith("COVERAGE_")]:
            environment.delenv(name)
        measuring.stop()
        try:
            return (yield)
        finally:
            measuring.start()


def _is_measured(item: pytest.Item) -> bool:
    """Whether coverage measures a test: in `make test-all` nearly every one, in CI not those of hosts and plugins."""
    if item.get_closest_marker("unmeasured") is not None:
        return False
    if os.environ.get("EXHAUSTIVE"):
        return True
    return not any(item.path.is_relative_to(_ROOT / folder) for folder in ("hosts", "plugins"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """
    Deselect the files of other shards, and the tests marked gpu where there is no NVIDIA GPU: torch is imported only if
    there are such tests.

    Where files are dealt out to processes, long ones come first: no process is still at one when the others are done.
    """
    if shard := os.environ.get("SHARD"):
        number, count = map(int, shard.split("/"))
        others = [item for item in items if crc32(item.nodeid.partition("::")[0].encode()) % count != number % count]
        items[:] = [item for item in items if item not in set(others)]
        config.hook.pytest_deselected(items=others)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("long") is None)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or _gpu_is_available():
        return
    items[:] = [item for item in items if item not in marked]
    config.hook.pytest_deselected(items=marked)
    config.stash[_DESELECTED] = len(marked)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests did not run for want of a GPU."""
    if count := config.stash.get(_DESELECTED, 0):
        reason = "torch.cuda.is_available() is False here"
        terminalreporter.write_line(
            f"gpu tests: {count} deselected, since {reason}; `make test-gpu` runs them on an NVIDIA GPU"
        )


def pytest_runtest_setup(item: pytest.Item) -> None:
    """
    Give torch the seed of the run, as pytest-randomly does for random and numpy, and nothing that was compiled before:
    a frame that another test left uncompiled stays so, also with `fullgraph=True`. Import nothing for it.
    """
    torch = sys.modules.get("torch")
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    seed = item.config.getoption("randomly_seed", default=0)
    if torch is not None and isinstance(seed, int):
        torch.manual_seed(seed)


def _gpu_is_available() -> bool:
    import torch  # noqa: PLC0415 - runs without GPU tests pay nothing for it

    return bool(torch.cuda.is_available())
