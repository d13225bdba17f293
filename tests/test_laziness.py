"""Which modules importing and selecting do not import, each in a fresh interpreter."""

from __future__ import annotations

import json
import os
import sys

import pytest

from tools.forked import run_fresh

pytestmark = pytest.mark.unmeasured

PRELUDE = "import json, sys; before = set(sys.modules)\n"
REPORT = "\nprint(json.dumps(sorted(set(sys.modules) - before)))"
REQUEST = "attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype='float32')"
HEAVY = {"torch", "transformers", "numpy", "rich", "pluggy", "attnplug.contract", "attnplug.torch_backend"}


def _imported(code: str) -> set[str]:
    """Return the modules that a fresh interpreter imports when it runs the code; the code prints nothing."""
    done = run_fresh("-c", PRELUDE + code + REPORT, env=_bare())
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def _bare() -> dict[str, str]:
    """Return the environment without what makes an interpreter import more: coverage's hook and attnplug's settings."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("COV", "ATTNPLUG_", "PYTEST"))}


def _third_party(modules: set[str]) -> set[str]:
    roots = {name.partition(".")[0] for name in modules}
    return {root for root in roots if root not in sys.stdlib_module_names and root != "attnplug"}


def test_import_alone_needs_attrs_at_most() -> None:
    found = _imported("import attnplug")

    assert _third_party(found) <= {"attr", "attrs"}
    assert {name for name in found if name.startswith("attnplug")} <= {"attnplug", "attnplug._lazy"}
    assert not found & {"tomllib", "importlib.metadata", "logging"}


def test_the_options_of_the_kit_cost_other_test_runs_nothing() -> None:
    found = _imported("import pytest; before = set(sys.modules)\nimport attnplug_kit.pytest_plugin")

    assert found == {"attnplug_kit", "attnplug_kit.pytest_plugin"}


def test_a_request_needs_attrs_only() -> None:
    found = _imported(f"import attnplug; {REQUEST}; attnplug.Device.cuda('9.0')")

    assert _third_party(found) == {"attr", "attrs"}
    assert not found & {"tomllib", "importlib.metadata"}


@pytest.mark.parametrize(
    "code",
    [
        f"attnplug.select({REQUEST}, device=attnplug.Device.cpu())",
        f"str(attnplug.explain({REQUEST}, attnplug.Device.cpu()))",
        f"str(attnplug.explain({REQUEST}, attnplug.Device.cuda('9.0'), assume_installed=True))",
        f"attnplug.plan({{'layers.0': {REQUEST}}}, device=attnplug.Device.cpu())",
        f"attnplug.select({REQUEST}, device=attnplug.Device.cpu()).to_dict()",
    ],
    ids=["select", "explain", "what-if", "plan", "to_dict"],
)
def test_deciding_imports_no_backend_and_nothing_heavy(code: str) -> None:
    found = _imported(f"import attnplug; {code}")

    assert not found & HEAVY
    assert _third_party(found) <= {"attr", "attrs", "packaging", "platformdirs", "tomli"}


def test_deciding_opens_no_evidence() -> None:
    found = _imported(f"import attnplug; attnplug.select({REQUEST}, device=attnplug.Device.cpu())")

    assert "attnplug.selection.select" in found
    assert not found & {"attnplug.evidence.store", "attnplug.evidence.coverage"}


def test_unverified_values_are_listed_without_heavy_imports() -> None:
    found = _imported(
        f"import attnplug; assert attnplug.select({REQUEST}, device=attnplug.Device.cpu()).unverified is not None"
    )

    assert "attnplug.evidence.store" in found
    assert not found & HEAVY
    assert _third_party(found) <= {"attr", "attrs", "packaging", "platformdirs", "tomli"}


def test_loading_is_what_imports_the_contract() -> None:
    found = _imported(f"import attnplug; attnplug.load({REQUEST}, device=attnplug.Device.cpu(), backend='torch')")

    assert {"torch", "attnplug.contract", "attnplug.torch_backend"} <= found


@pytest.mark.parametrize("words", [[], ["list", "--json"]], ids=["alone", "list"])
def test_the_command_needs_neither_torch_nor_rich(words: list[str]) -> None:
    code = "from attnplug.cli.main import main\nimport contextlib, io\n"
    code += f"with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): main({words})"

    found = _imported(code)

    assert "attnplug.discovery" in found
    assert not found & HEAVY
