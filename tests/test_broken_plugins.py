"""
Broken plugins are isolated and reported.

Each is a distribution under ``tests/plugins``, installed beside a good one, and examined in another Python.
"""

from __future__ import annotations

import json
import os
import re
from typing import TYPE_CHECKING

import pytest

from tests.command import WITHOUT_PLUGINS
from tests.plugins.preamble import PREAMBLE
from tests.plugins.workshop import PLUGINS, Workshop, run
from tools import forked

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.plugins.preamble import RunCode

pytestmark = pytest.mark.long

# What each does when it is loaded: the error's type, its cause, and what is said.
FAILING = {
    "raises_on_import": ("PluginLoadError", "ImportError", "libacme.so.4: cannot open shared object file"),
    "missing_library": ("PluginLoadError", "OSError", "libacme_that_is_not_there.so.4"),
    "exits_on_import": ("PluginLoadError", "SystemExit", "does not import: SystemExit: 3"),
    "fails_on_import": ("PluginLoadError", "RuntimeError", "no CUDA device is available"),
    "unknown_argument": ("PluginContractError", "PluginValidationError", "attnplug_backend(variant, colour)"),
    "raising_probe": ("PluginLoadError", "ValueError", "cannot probe cpu for default"),
}
NAMED = f"""
found = {{}}
for name in {list(FAILING)!r}:
    try:
        attnplug.load(request, cpu, backend=name)
    except attnplug.AttnplugError as error:
        found[name] = [type(error).__name__, type(error.__cause__).__name__, str(error), error.fix]
print(json.dumps(found))
"""
AMONG_OTHERS = f"""
found = {{}}
before = [p[0] for p in listing()[0]]
statuses = {{id: status for id, (status, *_) in verdicts(attnplug.explain(request, cpu)).items()}}
for name in {list(FAILING)!r}:
    loaded = attnplug.load(request, cpu, backend=[name, "good", "auto"]).id
    reported = verdicts(attnplug.explain(request, cpu, backend=["good", "auto"]))
    attnplug.refresh()
    again = {{id: status for id, (status, *_) in verdicts(attnplug.explain(request, cpu)).items()}}
    same = before == [p[0] for p in listing()[0]] and again == statuses
    found[name] = [loaded, reported, same]
print(json.dumps(found))
"""


def test_a_named_plugin_fails_with_its_own_error(run_code: RunCode) -> None:
    found = run_code(NAMED, "good", *FAILING)

    assert {name: (kind, cause) for name, (kind, cause, *_) in found.items()} == {
        name: (kind, cause) for name, (kind, cause, _) in FAILING.items()
    }
    for name, (*_, text, fix) in found.items():
        assert FAILING[name][2] in text
        assert fix


def test_a_failing_plugin_is_isolated(run_code: RunCode) -> None:
    """The others load as before, the failure is reported with its reason, and a refresh forgets it."""
    found = run_code(AMONG_OTHERS, "good", *FAILING, forked=True)

    assert set(found) == set(FAILING)
    for name, (loaded, reported, same) in found.items():
        status, distribution, reasons, _ = reported.pop(f"{name}/default")
        assert (loaded, status) == ("good/toy", "broken")
        assert distribution == f"attnplug-{name.replace('_', '-')} 1.0"
        assert FAILING[name][2] in " ".join(reasons)
        assert reported.pop("good/toy")[0] == "chosen"
        others = {"torch/sdpa", *(f"{other}/default" for other in FAILING if other != name)}
        assert {reported[other][0] for other in others} == {"eligible"}
        assert same


def test_all_failing_plugins_together_leave_the_good_one(run_code: RunCode) -> None:
    code = f"""
loaded = attnplug.load(request, cpu, backend=[*{list(FAILING)!r}, "auto"]).id
reported = verdicts(attnplug.explain(request, cpu))
print(json.dumps([loaded, [reported[name + "/default"][0] for name in {list(FAILING)!r}]]))
"""
    loaded, statuses = run_code(code, "good", *FAILING, forked=True)

    assert loaded == "good/toy"
    assert statuses == ["broken"] * len(FAILING)


def test_doctor_finds_them_all(workshop: Workshop, tmp_path: Path) -> None:
    site = workshop.install(tmp_path / "site", "good", *FAILING)

    done = _attnplug(site, tmp_path, "doctor", "--load", "--json")

    trials = {trial["id"]: trial for trial in json.loads(done.stdout)["loading"]}
    assert done.returncode == 1
    assert trials["good/toy"]["status"] == "loaded"
    for name, (_, _, said) in FAILING.items():
        assert trials[f"{name}/default"]["status"] == "failed"
        assert said in trials[f"{name}/default"]["text"]


# Metadata


def test_malformed_entry_points_are_noted_and_hide_no_plugin(run_code: RunCode) -> None:
    code = "print(json.dumps([attnplug.select(request, cpu).id, listing()]))"

    chosen, (plugins, notes) = run_code(code, "good", "no_equals", "not_utf8")

    assert chosen == "good/toy"
    assert {"good", "torch"} <= {name for name, *_ in plugins}
    assert not {"no_equals", "not_utf8"} & {name for name, *_ in plugins}
    (no_equals,) = (note for note in notes if note.startswith("attnplug-no-equals 1.0: "))
    (not_utf8,) = (note for note in notes if note.startswith("attnplug-not-utf8 1.0: "))
    assert "'no_equals attnplug_no_equals.plugin', which is no `name = value`" in no_equals
    assert "cannot be read: UnicodeDecodeError" in not_utf8


@pytest.mark.parametrize("name", ["no_equals", "not_utf8"])
def test_an_entry_point_that_torch_cannot_read_is_reported(name: str, run_code: RunCode) -> None:
    """Importing torch reads every distribution's entry points, and fails where one is malformed."""
    code = """
try:
    found = attnplug.load(request, cpu).id
except attnplug.AttnplugError as error:
    found = [type(error).__name__, str(error), error.fix]
print(json.dumps(found))
"""
    kind, text, fix = run_code(code, "good", name)

    assert kind == "PluginLoadError"
    assert "torch, which does not import" in text
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in fix
    assert run_code(code, "good", name, forked=True, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "good/toy"


@pytest.mark.parametrize("order", [("good", "stale"), ("stale", "good")])
def test_the_first_version_on_the_path_is_used_with_its_module(
    order: tuple[str, str], workshop: Workshop, tmp_path: Path
) -> None:
    """Two real versions of one distribution, with different modules: what is shadowed is noted, and does not run."""
    sites = [workshop.install(tmp_path / name, name) for name in order]
    code = """
backend = attnplug.load(request, cpu, backend="good")
modules = sorted(name for name in sys.modules if name in ("attnplug_good", "attnplug_stale"))
print(json.dumps([backend.selection.distribution, modules, listing()[1]]))
"""
    distribution, modules, notes = run(PREAMBLE + code, *sites, home=tmp_path, forked=True)

    used, shadowed = ("1.0", "0.9") if order[0] == "good" else ("0.9", "1.0")
    assert distribution == f"attnplug-good {used}"
    assert modules == [f"attnplug_{order[0]}"]
    (note,) = (note for note in notes if "shadowed" in note)
    assert note.startswith(f"attnplug-good {shadowed}: ")
    assert str(sites[1]) in note
    assert f"attnplug-good {used}" in note


# A probe that takes its time


def test_selecting_runs_no_probe(run_code: RunCode, tmp_path: Path) -> None:
    """Listing, explaining and selecting call no probe; this one would raise after a minute."""
    code = "print(json.dumps([len(listing()[0]), attnplug.select(request, cpu, backend='slow_probe').id]))"
    trace = tmp_path / "trace"

    _, identity = run_code(code, "good", "slow_probe", SLOW_PROBE_TRACE=str(trace), SLOW_PROBE_UNTIL="/nowhere")

    assert identity == "slow_probe/default"
    assert not trace.exists()


def test_a_slow_probe_blocks_no_other_thread(run_code: RunCode, tmp_path: Path) -> None:
    """Its probe ends once another backend is loaded: with a common lock it would raise after a minute."""
    done = tmp_path / "done"
    code = f"""
import threading, time
from pathlib import Path
loaded = {{}}
def load(name):
    loaded[name] = attnplug.load(request, cpu, backend=name).id
import attnplug.contract
thread = threading.Thread(target=load, args=["slow_probe"])
thread.start()
while not Path({str(tmp_path / "trace")!r}).exists():
    time.sleep(0.01)
load("good")
attnplug.explain(request, cpu)
Path({str(done)!r}).touch()
thread.join()
print(json.dumps(loaded))
"""
    loaded = run_code(
        code, "good", "slow_probe", forked=True, SLOW_PROBE_TRACE=str(tmp_path / "trace"), SLOW_PROBE_UNTIL=str(done)
    )  # fmt: skip

    assert loaded == {"good": "good/toy", "slow_probe": "slow_probe/default"}


def test_a_probe_runs_once_per_load_and_its_time_is_shown(workshop: Workshop, tmp_path: Path) -> None:
    site = workshop.install(tmp_path / "site", "slow_probe")
    trace = tmp_path / "trace"

    done = _attnplug(
        site, tmp_path, "doctor", "--load", "--json", SLOW_PROBE="0.25", SLOW_PROBE_TRACE=str(trace)
    )  # fmt: skip

    (trial,) = (trial for trial in json.loads(done.stdout)["loading"] if trial["id"] == "slow_probe/default")
    assert trial["status"] == "loaded"
    took = re.fullmatch(r"in (\d+\.\d) s", trial["text"])
    assert took is not None
    assert float(took[1]) >= 0.2
    assert trace.read_text(encoding="utf-8") == "default\n"


# A manifest with false claims


@pytest.mark.slow
def test_a_correct_plugin_passes_the_kit(workshop: Workshop, tmp_path: Path) -> None:
    done = _conformance(workshop.install(tmp_path / "site", "good"), tmp_path, "good")

    assert done.returncode == 0, done.stdout
    assert "(100%)" in done.stdout


@pytest.mark.unmeasured
def test_the_kit_detects_features_that_a_plugin_drops(workshop: Workshop, tmp_path: Path) -> None:
    """Every dropped feature by its name, and not what the plugin does right."""
    done = _conformance(
        workshop.install(tmp_path / "site", "drops_features"),
        tmp_path,
        "drops_features",
        "-k",
        "is_used or mixed or slots",
    )

    failed = re.findall(r"^FAILED \S+::test_(\w+)(?:\[drops_features/default-(\S+)\])?", done.stdout, re.MULTILINE)
    assert done.returncode == 1
    assert {test for test, _ in failed} == {"feature_is_used", "input_is_used"}
    assert {name.partition("=")[0] for test, name in failed} == {"sinks", "sliding_window", "logits_soft_cap"}


@pytest.mark.unmeasured
def test_the_kit_detects_side_effects_of_importing_a_plugin(workshop: Workshop, tmp_path: Path) -> None:
    site = workshop.install(tmp_path / "site", "writes_on_import")
    options = ("-q", "--pyargs", "attnplug_kit", "--attn-backend=writes_on_import", "-k", "TestPurity")
    done = _python(site, tmp_path, "pytest", *options, WRITES_ON_IMPORT="trace.txt")

    assert done.returncode == 1
    assert "importing its module wrote ['trace.txt']" in done.stdout
    assert re.findall(r"^FAILED \S+::test_(\w+)", done.stdout, re.MULTILINE) == ["importing_has_no_side_effects"]


def test_the_kit_says_why_a_broken_plugin_cannot_be_tested(workshop: Workshop, tmp_path: Path) -> None:
    site = workshop.install(tmp_path / "site", "malformed")
    done = _python(site, tmp_path, "pytest", "--pyargs", "attnplug_kit", "--attn-backend=malformed")

    said = " ".join(done.stderr.split())
    assert done.returncode == 4
    assert "it is installed, and broken: " in said
    assert "attnplug.toml:" in said


@pytest.mark.parametrize("name", ["duplicate", "catalogue", "good", "drops_features", "slow_probe", "stale"])
def test_check_of_a_sound_project_finds_no_problem(name: str, tmp_path: Path) -> None:
    done = _attnplug(tmp_path, tmp_path, "check", str(PLUGINS / name))

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("malformed", "attnplug.toml:5: it is not TOML"),
        ("api_major", "attnplug.toml:1: api = '2.0'"),
        ("unknown_argument", "plugin.py:9: the argument 'colour' of attnplug_backend"),
    ],
)
def test_check_finds_what_can_be_read(name: str, said: str, tmp_path: Path) -> None:
    done = _attnplug(tmp_path, tmp_path, "check", str(PLUGINS / name))

    assert done.returncode == 1
    assert said in done.stdout


def _conformance(site: Path, home: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the conformance kit as the author of a plugin does."""
    return _python(site, home, "pytest", "-q", "--pyargs", "attnplug_kit", f"--attn-backend={name}", *words)


def _attnplug(site: Path, home: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command with a folder of plugins on the path."""
    return _python(site, home, "attnplug", *words, **environment)


def _python(site: Path, home: Path, module: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outside = {name: value for name, value in os.environ.items() if not name.startswith(("ATTNPLUG_", "PYTEST"))}
    path = os.pathsep.join((str(site), str(WITHOUT_PLUGINS)))
    own = {"PYTHONPATH": path, "XDG_CONFIG_HOME": str(home), "HOME": str(home), "CUDA_VISIBLE_DEVICES": ""}
    return forked.run("-m", module, *words, env={**outside, **own, **environment}, cwd=home)
