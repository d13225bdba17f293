"""
Discovery and selection with plugins that are really installed; each test runs another Python.

The plugins are the distributions under ``tests/plugins``; what is said here about order, isolation and laziness is what
a user of several vendors' plugins relies on.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.plugins.preamble import PREAMBLE
from tests.plugins.workshop import PLUGINS, Workshop, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.plugins.preamble import RunCode

pytestmark = [pytest.mark.long, pytest.mark.unmeasured]

EVERYTHING = (
    "exits_on_import",
    "fails_on_import",
    "missing_library",
    "no_equals",
    "not_utf8",
    "raising_probe",
    "slow_probe",
    "unknown_argument",
    "api_major",
    "api_minor",
    "catalogue",
    "duplicate",
    "good",
    "malformed",
    "opt_in",
    "raises_on_import",
    "writes_on_import",
)


def test_pip_installs_one_and_it_serves(tmp_path: Path) -> None:
    """From pip to numbers: installation, selection, import, a paged call, compared with torch's attention."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--disable-pip-version-check"]
    target = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(PLUGINS / "good")]
    subprocess.run(command, check=True)
    code = """
    import torch
    torch.set_num_threads(1)
    backend = attnplug.load(request, cpu)
    impl = backend.make_impl(attnplug.Layer(name="layers.0"))
    limits = attnplug.Limits(max_num_reqs=2, max_num_tokens=16, max_seq_len=32, num_blocks=4)
    builder = backend.make_builder([impl], backend.make_state(limits))
    table, slots = torch.tensor([[2, 1]], dtype=torch.int32), torch.arange(32, 37)
    batch = attnplug.Batch.from_lengths([5], [5], block_table=table, slot_mapping=slots)
    q, k, v = torch.randn(5, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    out = torch.zeros(5, 32)
    impl.forward(q, k, v, backend.make_cache(4), builder.build(batch), out)
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    true = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    error = (out.view(5, 4, 8) - true[0].transpose(0, 1)).abs().max().item()
    print(json.dumps([backend.id, backend.selection.distribution, backend.agreement.options["flavour"], error]))
    """

    identity, distribution, flavour, error = run(PREAMBLE + _dedented(code), target, home=tmp_path)

    assert (identity, distribution, flavour) == ("good/toy", "attnplug-good 1.0", "plain")
    assert error < 1e-6


def test_an_editable_installation_is_found(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    site = Workshop(tmp_path / "wheels", "editable").install(tmp_path / "site", "good")
    code = (
        f"import site; site.addsitedir({str(site)!r})\n"
        + PREAMBLE
        + "print(json.dumps(attnplug.select(request, cpu).id))"
    )

    assert run(code, home=tmp_path) == "good/toy"
    assert not (site / "attnplug_good").exists()


# Neighbours, duplicates, copies (acceptance 1 to 4)


@pytest.mark.parametrize(
    "content",
    [
        b"[other]\na line without the sign\n",
        b"[other]\nname = \xff\xfe\n",
        b"[attnplug.backends]\nodd = not a module!\n",
    ],
)
def test_a_malformed_neighbour_hides_nothing(content: bytes, run_code: RunCode, tmp_path: Path) -> None:
    neighbour = tmp_path / "neighbours" / "neighbour-0.1.dist-info"
    neighbour.mkdir(parents=True)
    (neighbour / "METADATA").write_text("Metadata-Version: 2.1\nName: neighbour\nVersion: 0.1\n", encoding="utf-8")
    (neighbour / "entry_points.txt").write_bytes(content)

    chosen, (plugins, notes) = run_code(
        "print(json.dumps([attnplug.select(request, cpu).id, listing()]))",
        "good",
        "catalogue",
        sites=(neighbour.parent,),
    )

    assert chosen == "good/toy"
    assert {"acme_flash", "good", "torch"} <= {name for name, *_ in plugins}
    assert [note for note in notes if note.startswith("neighbour 0.1: ")]


def test_duplicates_are_reported_alike_whatever_the_order(workshop: Workshop, tmp_path: Path) -> None:
    sites = [workshop.install(tmp_path / name, name) for name in ("good", "duplicate")]
    code = (
        PREAMBLE
        + "print(json.dumps([attnplug.select(request, cpu).id, verdicts(attnplug.explain(request, cpu))['good']]))"
    )

    outcomes = [
        run(code, *order, home=tmp_path, PYTHONHASHSEED=str(seed))
        for seed in range(10)
        for order in (sites, sites[::-1])
    ]

    assert all(outcome == outcomes[0] for outcome in outcomes)
    chosen, (status, distributions, reasons, fix) = outcomes[0]
    assert (chosen.partition("/")[0], status) == ("torch", "broken")
    assert distributions == "attnplug-duplicate 2.5, attnplug-good 1.0"
    assert "offered by attnplug-duplicate 2.5 and by attnplug-good 1.0" in reasons[0]
    assert "ATTNPLUG_BLOCK=attnplug-duplicate to keep 'attnplug-good'" in fix


def test_a_named_duplicate_fails_and_the_proposed_settings_fix_it(run_code: RunCode) -> None:
    code = """
try:
    found = attnplug.select(request, cpu, backend="good").distribution
except attnplug.NoBackendError as error:
    found = " ".join(str(error).split())
print(json.dumps(found))
"""
    both = ("good", "duplicate")

    error = run_code(code, *both)
    assert "attnplug-duplicate 2.5 and by attnplug-good 1.0" in error
    assert "ATTNPLUG_BLOCK=attnplug-good" in error
    assert run_code(code, *both, ATTNPLUG_BLOCK="attnplug-good") == "attnplug-duplicate 2.5"
    assert run_code(code, *both, ATTNPLUG_BLOCK="attnplug_duplicate") == "attnplug-good 1.0"
    assert run_code(code, *both, ATTNPLUG_ALLOW="attnplug-duplicate,torch") == "attnplug-duplicate 2.5"


def test_the_distribution_that_was_chosen_is_the_one_that_loads(run_code: RunCode) -> None:
    code = "print(json.dumps(type(attnplug.load(request, cpu, backend='good').wrapped).__name__))"

    assert run_code(code, "good", "duplicate", forked=True, ATTNPLUG_BLOCK="attnplug-good") == "OtherBackend"


def test_a_stale_copy_is_not_used_and_is_noted(workshop: Workshop, tmp_path: Path) -> None:
    fresh, stale = (workshop.install(tmp_path / name, "good") for name in ("fresh", "stale"))
    old = stale / "attnplug_good-1.0.dist-info"
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: attnplug-good\nVersion: 0.9\n", encoding="utf-8")
    code = PREAMBLE + "print(json.dumps([attnplug.select(request, cpu).distribution, listing()]))"

    distribution, (plugins, notes) = run(code, fresh, stale, home=tmp_path)

    assert distribution == "attnplug-good 1.0"
    assert len([name for name, *_ in plugins if name == "good"]) == 1
    (note,) = (note for note in notes if "shadowed" in note)
    assert note.startswith("attnplug-good 0.9")
    assert str(stale) in note


# What does not run (acceptance 5, 6)


def test_selecting_imports_no_plugin_and_no_library(run_code: RunCode) -> None:
    code = """
listing(), attnplug.select(request, cpu)
str(attnplug.explain(request, attnplug.Device.cuda("9.0"), assume_installed=True))
attnplug.refresh()
attnplug.plan({"layers.0": request, "layers.1": request.evolve(sliding_window=4)}, cpu)
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    loaded = run_code(code, *EVERYTHING, WRITES_ON_IMPORT="/nowhere/to/write", SLOW_PROBE_TRACE="/nowhere/to/write")

    tops = {name.partition(".")[0] for name in loaded}
    assert not tops & {
        "torch",
        "triton",
        "numpy",
        "transformers",
        "flashinfer",
        "flash_attn",
        "pluggy",
        "rich",
    }
    assert not {top for top in tops if top.startswith("attnplug_")}
    assert "importlib.metadata" not in loaded
    assert "attnplug.discovery.registry" in loaded


@pytest.mark.parametrize(
    ("code", "environment", "runs"),
    [
        ("listing(), attnplug.explain(request, cpu)", {}, False),
        ("attnplug.select(request, cpu, backend='writes_on_import')", {}, False),
        ("attnplug.load(request, cpu)", {"ATTNPLUG_BLOCK": "writes_on_import"}, False),
        ("attnplug.select(request, cpu)", {"ATTNPLUG_BLOCK": "attnplug-writes-on-import"}, False),
        ("attnplug.select(request, cpu)", {"ATTNPLUG_ALLOW": "torch"}, False),
        ("attnplug.load(request, cpu)", {}, True),
    ],
)
def test_code_runs_only_when_its_backend_is_loaded(
    code: str, environment: dict[str, str], runs: bool, run_code: RunCode, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"

    run_code(f"{code}\nprint('0')", "writes_on_import", forked=True, WRITES_ON_IMPORT=str(trace), **environment)

    assert trace.exists() == runs


# Settings (acceptance 7, 8)


def test_an_empty_allow_list_allows_nothing(run_code: RunCode) -> None:
    code = """
try:
    attnplug.load(request, cpu)
except attnplug.NoBackendError as error:
    print(json.dumps([v.status for v in error.explanation.verdicts] + [str(error)]))
"""
    *statuses, error = run_code(code, "good", ATTNPLUG_ALLOW="")

    assert set(statuses) <= {"refused", "absent"}
    assert "not even the built-in backend" in error
    assert "environment variable ATTNPLUG_ALLOW" in error


def test_an_unknown_name_in_a_list_warns_once_with_the_near_match(run_code: RunCode) -> None:
    code = """
import logging
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append([record.levelname, record.getMessage()])
logging.getLogger("attnplug").addHandler(handler)
for _ in range(2):
    attnplug.select(request, cpu), attnplug.explain(request, cpu, assume_installed=True)
print(json.dumps([record for record in records if record[0] == "WARNING"]))
"""
    warnings = run_code(code, "good", ATTNPLUG_BLOCK="godo,torch", ATTNPLUG_ALLOW="attnplug-goood,good")

    assert [level for level, _ in warnings] == ["WARNING", "WARNING"]
    assert "'attnplug-goood'" in warnings[0][1]
    assert "did you mean 'attnplug-good'?" in warnings[0][1]
    assert "'godo'" in warnings[1][1]
    assert "ATTNPLUG_BLOCK" in warnings[1][1]
    assert "did you mean 'good'?" in warnings[1][1]


@pytest.mark.parametrize(("value", "outcome"), [("0", "good/toy"), ("False", "good/toy"), ("no", "good/toy")])
def test_every_spelling_of_off_turns_strict_off(value: str, outcome: str, run_code: RunCode) -> None:
    assert (
        run_code("print(json.dumps(attnplug.select(request, cpu).id))", "good", "malformed", ATTNPLUG_STRICT=value)
        == outcome
    )


@pytest.mark.parametrize(
    ("value", "error"),
    [("1", "ManifestError"), ("true", "ManifestError"), ("maybe", "SettingsError"), ("2", "SettingsError")],
)
def test_strict_raises_and_nonsense_is_refused(value: str, error: str, run_code: RunCode) -> None:
    code = """
try:
    attnplug.select(request, cpu)
except attnplug.AttnplugError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""
    name, text = run_code(code, "good", "malformed", ATTNPLUG_STRICT=value)

    assert name == error
    assert ("attnplug.toml:5" if error == "ManifestError" else "ATTNPLUG_STRICT") in text


# Failures (acceptance 9, 10, 11)


def test_each_status_has_its_own_message_and_fix(run_code: RunCode) -> None:
    code = """
hopper = attnplug.explain(request.evolve(dtype="bfloat16", head_size=64), attnplug.Device.cuda("9.0"))
found = verdicts(hopper)
found["acme_flash/fa2 for float32"] = verdicts(attnplug.explain(request, attnplug.Device.cuda("9.0")))["acme_flash/fa2"]
print(json.dumps(found))
"""
    found = run_code(code, "catalogue", "malformed", "api_major")

    def status_reason_and_fix(name: str) -> tuple[str, str, str]:
        status, _, reasons, fix = found[name]
        return status, reasons[0], fix

    absent = status_reason_and_fix("blocksparse")
    lacking = status_reason_and_fix("acme_flash/fa2")
    refused = status_reason_and_fix("acme_flash/fa2 for float32")
    broken = status_reason_and_fix("malformed")
    other = status_reason_and_fix("api_major")

    assert absent[0] == "absent"
    assert absent[2].startswith("pip install ")
    assert absent[2].endswith("/plugins/blocksparse")  # of the checkout that core runs from
    assert lacking == (
        "missing_dependency",
        "acme-flash-attn >=2.7.1,<2.9 is required and not installed",
        "pip install 'acme-flash-attn >=2.7.1,<2.9'",
    )
    assert refused[0] == "refused"
    assert refused[1].startswith("does not support dtype=float32; supported: bfloat16")
    assert "none: this variant does not support dtype=float32" in refused[2]
    assert broken[0] == "broken"
    assert "attnplug_malformed/attnplug.toml:5: it is not TOML" in broken[1]
    assert broken[2] == "correct the syntax"
    assert other[0] == "refused"
    assert "this core has contract 1.x" in other[1]
    assert "api = '2.0'" in other[1]
    assert len({each[2] for each in (absent, lacking, refused, broken, other)}) == 5


def test_a_newer_minor_contract_is_accepted_and_noted(run_code: RunCode) -> None:
    code = "print(json.dumps([attnplug.load(request, cpu).id, listing()]))"

    chosen, (_, notes) = run_code(code, "api_minor", forked=True)

    assert chosen == "api_minor/default"
    assert [note for note in notes if note.startswith("attnplug-api-minor 1.0: ") and "contract 1.9" in note]


def test_a_plugin_that_does_not_import_is_left_out_and_remembered(run_code: RunCode) -> None:
    code = """
first = attnplug.registry().generation
loaded = attnplug.load(request, cpu, backend=["raises_on_import", "auto"]).id
again = attnplug.select(request, cpu, backend=["raises_on_import", "auto"]).id
reported = verdicts(attnplug.explain(request, cpu))["raises_on_import/default"]
print(json.dumps([loaded, again, reported, attnplug.registry().generation > first]))
"""
    loaded, again, (status, _, reasons, _), newer = run_code(code, "good", "raises_on_import", forked=True)

    assert loaded == again == "good/toy"
    assert status == "broken"
    assert "libacme.so.4" in " ".join(reasons)
    assert newer


def test_a_named_plugin_that_does_not_import_raises_its_own_error(run_code: RunCode) -> None:
    code = """
from attnplug.errors import PluginLoadError
try:
    attnplug.load(request, cpu, backend="raises_on_import")
except PluginLoadError as error:
    print(json.dumps([type(error.__cause__).__name__, str(error)]))
"""
    cause, text = run_code(code, "good", "raises_on_import", forked=True)

    assert cause == "ImportError"
    assert "libacme.so.4" in text
    assert "attnplug-raises-on-import" in text


# Stability (acceptance 15, 18, 19)


def test_installing_what_is_opt_in_or_unusable_changes_no_decision(
    run_code: RunCode, workshop: Workshop, tmp_path: Path
) -> None:
    code = """
more = [{"dtype": "bfloat16", "sliding_window": 4}, {"paged": False}, {"head_size": 64}]
requests = [request, *(request.evolve(**changes) for changes in more)]
decisions = [attnplug.select(each, cpu).to_dict() for each in requests]
print(json.dumps([{name: decision[name] for name in ("agreement", "device")} for decision in decisions]))
"""
    before = run_code(code, "good")
    more = workshop.install(tmp_path / "more", "opt_in", "catalogue", "malformed", "api_major")

    assert run_code(code, "good", sites=(more,)) == before
    quantized = "print(json.dumps(attnplug.select(request.evolve(kv_cache_dtype='int8'), cpu).id))"
    assert run_code(quantized, "good", sites=(more,)) == "opt_in/default"


def test_a_repeated_request_is_cached_until_a_refresh(run_code: RunCode) -> None:
    code = """
import logging
records = []
handler = logging.Handler()
handler.emit = lambda record: records.append(record)
logger = logging.getLogger("attnplug")
logger.addHandler(handler)
logger.setLevel(logging.INFO)
def decisions():
    return len([record for record in records if hasattr(record, "selection")])
first = attnplug.select(request)
counts = [decisions()]
same = [attnplug.select(request) is first, attnplug.select(request.evolve()) is first]
counts.append(decisions())
attnplug.load(request)
from attnplug_good.plugin import CALLS
called = list(CALLS)
attnplug.select(request), attnplug.explain(request)
same.append(CALLS == called)
attnplug.refresh()
again = attnplug.select(request)
same += [again is not first, again.to_dict() == first.to_dict()]
counts.append(decisions())
print(json.dumps([same, counts, called]))
"""
    same, counts, called = run_code(code, "good", forked=True, CUDA_VISIBLE_DEVICES="")

    assert all(same)
    assert counts == [1, 1, 2]
    assert called == ["probe", "backend"]


def test_a_new_plugin_is_found_after_a_refresh(run_code: RunCode, workshop: Workshop, tmp_path: Path) -> None:
    (wheel,) = workshop.build("good")
    (tmp_path / "later").mkdir()
    code = f"""
from zipfile import ZipFile
before = [attnplug.select(request, cpu).backend]
with ZipFile({str(wheel)!r}) as archive:
    archive.extractall({str(tmp_path / "later")!r})
before.append(attnplug.select(request, cpu).backend)
attnplug.refresh()
print(json.dumps([*before, attnplug.select(request, cpu).backend]))
"""

    assert run_code(code, sites=(tmp_path / "later",)) == ["torch", "torch", "good"]


def test_registering_twice_changes_nothing_and_a_clash_is_refused(run_code: RunCode) -> None:
    code = f"""
from attnplug.errors import DuplicateBackendError
manifest = {str(PLUGINS / "duplicate" / "attnplug_duplicate" / "attnplug.toml")!r}
sys.path.append({str(PLUGINS / "duplicate")!r})
registered = [attnplug.register("attnplug_duplicate.plugin", manifest=manifest)]
first = attnplug.registry().generation, listing()
registered.append(attnplug.register("attnplug_duplicate.plugin", manifest=manifest))
same = (attnplug.registry().generation, listing()) == first
try:
    attnplug.register("elsewhere.plugin", manifest=manifest)
except DuplicateBackendError as error:
    clash = str(error)
same = same and (attnplug.registry().generation, listing()) == first
print(json.dumps([registered, same, clash, type(attnplug.load(request, cpu).wrapped).__name__]))
"""
    registered, same, clash, backend = run_code(code, forked=True)

    assert registered == ["good", "good"]
    assert same
    assert "'elsewhere.plugin'" in clash
    assert backend == "OtherBackend"


PROCESSES = """
import multiprocessing
def work(_):
    selection = attnplug.select(request, cpu)
    return [listing(), selection.to_dict(), selection.id]
if __name__ == "__main__":
    ours = json.loads(json.dumps(work(0)))
    theirs = {}
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            theirs[method] = pool.map(work, range(4), chunksize=1)
    same = [json.loads(json.dumps(result)) == ours for results in theirs.values() for result in results]
    loads = attnplug.Selection.from_dict(ours[1]).load().selection.id == ours[2]
    print(json.dumps([len(same), all(same), loads, ours[2]]))
"""


def test_forked_and_spawned_processes_agree(workshop: Workshop, tmp_path: Path) -> None:
    # Of two of these only the metadata is malformed: enough for `import torch` to fail, which this test does.
    apart = ("duplicate", "api_minor", "exits_on_import", "fails_on_import", "no_equals", "not_utf8")
    site = workshop.install(tmp_path / "site", *(name for name in EVERYTHING if name not in apart))

    count, same, loads, identity = run(PREAMBLE + PROCESSES, site, home=tmp_path)

    assert (count, same, loads, identity) == (8, True, True, "good/toy")


def test_threads_agree(run_code: RunCode) -> None:
    code = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
barrier = Barrier(32)
def work(_):
    barrier.wait()
    selection = attnplug.select(request, cpu)
    return id(attnplug.registry()), attnplug.registry().generation, id(selection), selection.id
with ThreadPoolExecutor(32) as pool:
    results = set(pool.map(work, range(32)))
print(json.dumps([len(results), results.pop()[-1]]))
"""

    assert run_code(code, "good", "catalogue", "malformed") == [1, "good/toy"]


# What-ifs


def test_what_other_devices_would_run(run_code: RunCode) -> None:
    code = """
served = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
cascade = served.evolve(cascade=True, sliding_window=64)
requests = {"plain": served, "sinks": served.evolve(sinks=True), "cascade": cascade}
decisions = {}
for name, request in requests.items():
    for capability in ("8.0", "9.0", "10.0"):
        device = attnplug.Device.cuda(capability)
        found = attnplug.explain(request, device, backend="acme_flash", assume_installed=True)
        decisions[f"{name} {capability}"] = [found.chosen and found.chosen.id, verdicts(found)]
print(json.dumps([decisions, "torch" in sys.modules]))
"""
    decisions, torch_imported = run_code(code, "catalogue")

    assert not torch_imported
    chosen = {request: identity for request, (identity, _) in decisions.items()}
    assert chosen == {
        "plain 8.0": "acme_flash/fa2",
        "plain 9.0": "acme_flash/fa3",
        "plain 10.0": "acme_flash/fa4",
        "sinks 8.0": None,
        "sinks 9.0": "acme_flash/fa3",
        "sinks 10.0": "acme_flash/fa4",
        "cascade 8.0": None,
        "cascade 9.0": None,
        "cascade 10.0": None,
    }
    _, verdicts = decisions["sinks 8.0"]
    status, distribution, reasons, fix = verdicts["acme_flash/fa3"]
    assert (status, distribution) == ("refused", "attnplug-catalogue 1.0")
    assert reasons == ["requires compute capability 9.0; the device has 8.0"]
    assert "9.0" in fix
    for name, (status, _, reasons, _) in decisions["cascade 9.0"][1].items():
        if name.startswith("acme_flash/"):
            assert status == "refused"
            assert "the shared prefix is one dense pass over every cached key" in " ".join(reasons)


def test_without_assume_installed_the_libraries_are_missing(run_code: RunCode) -> None:
    code = """
served = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
print(json.dumps(verdicts(attnplug.explain(served, attnplug.Device.cuda("9.0"), backend="ACME_FLASH"))))
"""
    verdicts = run_code(code, "catalogue")

    assert {name: verdicts[name][0] for name in verdicts if name.startswith("acme_flash/")} == {
        "acme_flash/dense": "chosen",
        "acme_flash/fa2": "missing_dependency",
        "acme_flash/fa3": "missing_dependency",
        "acme_flash/fa4": "missing_dependency",
    }


def _dedented(code: str) -> str:
    return "\n".join(line[4:] for line in code.splitlines())
