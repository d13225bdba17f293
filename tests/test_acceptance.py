"""
What a registry of plugins has to survive: twenty acceptance tests, and where each is.

Most have a module that they belong to; those of no other module are here.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.plugins.workshop import run

if TYPE_CHECKING:
    from tests.plugins.preamble import RunCode
    from tests.plugins.workshop import Workshop

ROOT = Path(__file__).parents[1]
BROKEN, INSTALLED = "tests/test_broken_plugins.py", "tests/test_installed_plugins.py"
HERE, KIT = "tests/test_acceptance.py", "kit/src/attnplug_kit/conformance"

ACCEPTANCE: dict[int, tuple[str, list[tuple[str, str]]]] = {
    1: (
        "a line without `=` in entry_points.txt hides no plugin, and is recorded by the distribution's name",
        [
            (BROKEN, "test_malformed_entry_points_are_noted_and_hide_no_plugin"),
            (INSTALLED, "test_a_malformed_neighbour_hides_nothing"),
        ],
    ),
    2: (
        "nor does a file that is not UTF-8, nor a value that is no module",
        [
            (BROKEN, "test_malformed_entry_points_are_noted_and_hide_no_plugin"),
            (BROKEN, "test_an_entry_point_that_torch_cannot_read_is_reported"),
            (INSTALLED, "test_a_malformed_neighbour_hides_nothing"),
            ("core/tests/discovery/test_plugin.py", "test_what_leads_nowhere_is_a_problem"),
        ],
    ),
    3: (
        "two distributions with one name are reported alike under ten hash seeds and both orders, each by its name",
        [
            (INSTALLED, "test_duplicates_are_reported_alike_whatever_the_order"),
            (INSTALLED, "test_a_named_duplicate_fails_and_the_proposed_settings_fix_it"),
        ],
    ),
    4: (
        "a stale copy later on sys.path is not loaded, and is reported as shadowed",
        [
            (BROKEN, "test_the_first_version_on_the_path_is_used_with_its_module"),
            (INSTALLED, "test_a_stale_copy_is_not_used_and_is_noted"),
        ],
    ),
    5: (
        "listing imports neither torch, nor triton, nor any plugin",
        [
            (INSTALLED, "test_selecting_imports_no_plugin_and_no_library"),
            ("tests/test_laziness.py", "test_the_command_needs_neither_torch_nor_rich"),
        ],
    ),
    6: ("a blocked plugin's module never runs", [(INSTALLED, "test_code_runs_only_when_its_backend_is_loaded")]),
    7: (
        "an empty allow list loads nothing; an unknown name in a list warns once, with the near match",
        [
            (INSTALLED, "test_an_empty_allow_list_allows_nothing"),
            (INSTALLED, "test_an_unknown_name_in_a_list_warns_once_with_the_near_match"),
        ],
    ),
    8: (
        "every spelling of off turns a setting off, and an invalid value is an error that names the variable",
        [
            (INSTALLED, "test_every_spelling_of_off_turns_strict_off"),
            (INSTALLED, "test_strict_raises_and_nonsense_is_refused"),
            ("core/tests/request/test_settings.py", "test_every_spelling_of_off_is_off"),
            ("core/tests/request/test_settings.py", "test_anything_else_is_an_error_that_names_the_variable"),
        ],
    ),
    9: (
        "ImportError, OSError, SystemExit and RuntimeError on import are isolated, and are the cause when named",
        [
            (BROKEN, "test_a_named_plugin_fails_with_its_own_error"),
            (BROKEN, "test_a_failing_plugin_is_isolated"),
            (BROKEN, "test_doctor_finds_them_all"),
        ],
    ),
    10: (
        "absent, missing_dependency, refused and broken have four messages with four fixes",
        [(INSTALLED, "test_each_status_has_its_own_message_and_fix")],
    ),
    11: (
        "a higher major api is rejected before import, a higher minor one is accepted and noted",
        [
            (HERE, "test_another_major_contract_is_rejected_before_its_code_runs"),
            (INSTALLED, "test_a_newer_minor_contract_is_accepted_and_noted"),
        ],
    ),
    12: (
        "a hook with fewer arguments runs; one with an unknown argument is refused with its signature, without a trace",
        [
            (INSTALLED, "test_a_repeated_request_is_cached_until_a_refresh"),
            (BROKEN, "test_a_named_plugin_fails_with_its_own_error"),
            (BROKEN, "test_a_failing_plugin_is_isolated"),
        ],
    ),
    13: (
        "one raising probe does not discard the other plugins' results",
        [
            (BROKEN, "test_a_failing_plugin_is_isolated"),
            (BROKEN, "test_all_failing_plugins_together_leave_the_good_one"),
        ],
    ),
    14: (
        "a circle in a declared order is an error, and what its message proposes makes it pass",
        [
            (HERE, "test_a_circular_order_is_an_error_and_the_proposed_one_passes"),
            (INSTALLED, "test_a_named_duplicate_fails_and_the_proposed_settings_fix_it"),
        ],
    ),
    15: (
        "adding opt-in plugins changes no decision",
        [(INSTALLED, "test_installing_what_is_opt_in_or_unusable_changes_no_decision")],
    ),
    16: (
        "when nothing fits, the error lists every known backend once with all its reasons, word by word",
        [("core/tests/selection/test_golden.py", "test_nothing_fits")],
    ),
    17: (
        "every declared capability is exercised, every other one is shown to be refused, and a false claim is detected",
        [
            (f"{KIT}/capabilities.py", "test_capability"),
            (f"{KIT}/refusals.py", "test_undeclared_is_refused"),
            (BROKEN, "test_a_correct_plugin_passes_the_kit"),
            (BROKEN, "test_the_kit_detects_features_that_a_plugin_drops"),
        ],
    ),
    18: (
        "the second identical request calls no plugin, and after a refresh it does",
        [(INSTALLED, "test_a_repeated_request_is_cached_until_a_refresh")],
    ),
    19: (
        "registering twice, and in a spawned worker, gives the same registry",
        [
            (INSTALLED, "test_registering_twice_changes_nothing_and_a_clash_is_refused"),
            (INSTALLED, "test_forked_and_spawned_processes_agree"),
        ],
    ),
    20: (
        "importing the core stays cheap: what it imports is tested, how long it takes is measured by `attnplug bench`",
        [
            (HERE, "test_importing_the_core_imports_attrs_and_little_else"),
            ("tests/test_laziness.py", "test_import_alone_needs_attrs_at_most"),
            ("kit/tests/bench/test_bench.py", "test_a_missed_budget_fails_the_run"),
        ],
    ),
}
"""What is required, and the tests that show it: (file, name)."""


def test_there_are_twenty() -> None:
    assert list(ACCEPTANCE) == list(range(1, 21))


@pytest.mark.parametrize("number", ACCEPTANCE)
def test_what_shows_it_exists(number: int) -> None:
    _, shown = ACCEPTANCE[number]

    assert shown
    assert [(file, name) for file, name in shown if name not in _tests(file)] == []


@lru_cache
def _tests(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# 11


def test_another_major_contract_is_rejected_before_its_code_runs(workshop: Workshop, tmp_path: Path) -> None:
    site = workshop.install(tmp_path / "site", "writes_on_import")
    _edit(site / "attnplug_writes_on_import" / "attnplug.toml", 'api = "1.0"', 'api = "2.0"')
    trace = tmp_path / "trace"
    code = """
import attnplug, json
request = attnplug.Requirements(head_size=8, num_q_heads=4, num_kv_heads=2, dtype="float32")
try:
    attnplug.load(request, attnplug.Device.cpu(), backend="writes_on_import")
except attnplug.NoBackendError as error:
    print(json.dumps(str(error)))
"""
    text = run(code, site, home=tmp_path, WRITES_ON_IMPORT=str(trace))

    assert "this core has contract 1.x" in text
    assert not trace.exists()


# 14


def test_a_circular_order_is_an_error_and_the_proposed_one_passes(
    run_code: RunCode, workshop: Workshop, tmp_path: Path
) -> None:
    """An order is a list of names, so a circle is a name that occurs twice: before and after another."""
    site = workshop.install(tmp_path / "site", "catalogue")
    manifest = site / "attnplug_catalogue" / "attnplug.toml"
    _edit(manifest, 'order = ["fa3", "fa4", "fa2", "dense"]', 'order = ["fa3", "fa4", "fa3", "fa2", "dense"]')
    code = """
served = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
found = attnplug.explain(served, attnplug.Device.cuda("9.0"), backend="acme_flash", assume_installed=True)
print(json.dumps([found.chosen and found.chosen.id, verdicts(found)]))
"""

    def explained() -> Any:
        return run_code(code, sites=(site,))

    chosen, found = explained()
    status, _, (reason,), fix = found["acme_flash"]
    assert (chosen, status, fix) == (None, "broken", "correct the list")
    assert "order = ['fa3', 'fa4', 'fa3', 'fa2', 'dense']" in reason
    allowed = reason.partition("each once: ")[2].split(", ")

    _edit(manifest, '["fa3", "fa4", "fa3", "fa2", "dense"]', str(allowed).replace("'", '"'))
    chosen, _ = explained()
    assert chosen == f"acme_flash/{allowed[0]}"


# 20


def test_importing_the_core_imports_attrs_and_little_else(tmp_path: Path) -> None:
    """As `python -X importtime` sees it, and so without anything that the interpreter's own start imports."""
    code = """
import json, os, subprocess, sys
def imported(code):
    own = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, env=own)
    return {line.split("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
print(json.dumps(sorted(imported("import attnplug") - imported("import attr, typing"))))
"""
    found = run(code, home=tmp_path)

    assert "attnplug" in found
    assert {name for name in found if name.partition(".")[0] not in ("attr", "attrs")} <= {"attnplug", "attnplug._lazy"}


def _edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
