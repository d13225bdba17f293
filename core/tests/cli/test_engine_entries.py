"""Engines that distributions add by entry points: compared, diagnosed, and harmless where they are broken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from attnplug.cli import engine

if TYPE_CHECKING:
    from collections.abc import Callable

LAYER = ("--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "8", "--dtype", "bfloat16")
HOPPER = ("--device", "cuda:9.0")
SOUND = """\
from attnplug.engines import EngineAnswer, EngineBackend, EngineChoice, EngineDiagnosis

BACKENDS = (
    EngineBackend("FAST", ("needs 8 heads",), "the new kernels", ("flash/new",)),
    EngineBackend("OLD", (), "the old kernels", ("flash/old",)),
    EngineBackend("SLOW"),
)

def choose(requirements, device, *, assume_installed):
    chosen = [EngineChoice("OLD", BACKENDS, ("num_q_heads",) if each.sinks else ()) for each in requirements]
    return EngineAnswer("Acme 2.1", chosen, (f"assume_installed={assume_installed}",), WARNINGS)

def diagnose(*, load):
    return EngineDiagnosis((f"load={load}",), WARNINGS, PROBLEMS)

WARNINGS = ()
PROBLEMS = ()
"""
BROKEN = {
    "raises": ("raise OSError('no such library')", "cannot be imported: OSError: no such library"),
    "exits": ("raise SystemExit('imported')", "cannot be imported: SystemExit: imported"),
    "does not parse": ("def", "cannot be imported: SyntaxError"),
    "lacks a function": (SOUND.replace("def diagnose", "def diagnosis"), "lacks diagnose"),
    "has no function": (SOUND.replace("def diagnose", "diagnose = 3\ndef _"), "is of the type int"),
}
FAILING = {
    "raises": ("raise OSError('gone')", "raised OSError: gone"),
    "exits": ("raise SystemExit(3)", "raised SystemExit: 3"),
    "returns nothing": ("return None", "returned a NoneType"),
    "returns texts": (
        "return EngineAnswer('Acme', 'OLD') or EngineDiagnosis('sound')",
        "raised TypeError: 'OLD' is one",
    ),
    "returns other values": ("return EngineAnswer('Acme', [3])", "raised TypeError: "),
}


@pytest.fixture
def add(site) -> Callable[..., None]:
    """Return ``add(source, name, distribution)``, which installs an engine beside the flash plugin."""

    def install(source: str = SOUND, name: str = "acme", distribution: str = "acme-engine") -> None:
        module = f"scratch_{distribution.replace('-', '_')}_{name}"
        (site.folder / f"{module}.py").write_text(source)
        site.metadata(distribution, "2.0", f"[attnplug.engines]\n{name} = {module}\n")

    return install


@pytest.mark.parametrize("supposed", [True, False])
def test_both_choices_come_first_with_why_they_differ(run, add, supposed: bool) -> None:
    add()

    done = run("explain", *LAYER, "--engine", "acme", *HOPPER, *["--assume-installed"] * supposed, "--all")

    ours = "flash/old" if not supposed else "flash/new"
    short, full = done.out.split("\n\n", 1)
    assert done.code == 0
    assert short.splitlines()[:3] == [
        "device: cuda:9.0",
        f"assumed: assume_installed={supposed}",
        "Acme 2.1 by itself: OLD (the old kernels)",
    ]
    assert f"\nattnplug: {ours} (" in short
    assert full.startswith("requested: ")
    assert full.endswith(
        "backends of Acme 2.1 on cuda:9.0, in its order of preference\n"
        "    FAST (the new kernels)  refused\n"
        "        - needs 8 heads\n"
        "    OLD (the old kernels)  chosen\n"
        "    SLOW  eligible\n\n"
    )
    assert ("both run the same kernels" in short) is not supposed
    if supposed:
        short = " ".join(short.split())
        assert "- Acme 2.1 refuses FAST (the new kernels), with the kernels of flash/new: needs 8 heads" in short
        assert "- attnplug prefers flash/new to flash/old, with the kernels of OLD" in short


def test_what_attnplug_refuses_is_said_with_its_reason(run, add) -> None:
    add()

    done = run("explain", *LAYER, "--sliding-window", "128", "--engine", "acme", "--device", "cuda:7.5")

    short = " ".join(done.out.split("\n\n")[0].split())
    assert "attnplug refuses flash/old, with the kernels of OLD: " in short
    assert "the device has 7.5" in short
    assert "(fix: run on cuda:8.0" in short
    assert "Acme 2.1 itself has no backend with the kernels of torch/sdpa" in short


def test_what_the_engine_ignores_is_said(run, add) -> None:
    add()

    done = run("explain", *LAYER, "--sinks", "--engine", "acme", *HOPPER)

    assert "- the selection of Acme 2.1 does not consider num_q_heads=8\n" in done.out


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ('None, (), (), "Acme has no int8"', "Acme has no int8"),
        ('None, (EngineBackend("A", ("too old",), "", ("flash/old",)),)', "Acme 2.1 refuses A, with the kernels of"),
        ('"A", (EngineBackend("A"),)', "attnplug knows no candidate with the kernels of A"),
        ('"A", (EngineBackend("A", same_as=["flash/new"]),)', "attnplug lacks a dependency of flash/new, with the"),
        (
            '"A", [EngineBackend("A"), EngineBackend("B", same_as=["flash/old"])]',
            "Acme 2.1 prefers A to B, with the kernels of flash/old",
        ),
        (
            '"A", (EngineBackend("A", same_as=["flashinfer/fa3"]),)',
            "flashinfer, with the kernels of A, is not installed",
        ),
    ],
)
def test_each_way_to_differ_has_its_reason(run, add, chosen: str, why: str) -> None:
    add(
        SOUND.replace(
            'EngineChoice("OLD", BACKENDS, ("num_q_heads",) if each.sinks else ())', f"EngineChoice({chosen})"
        )
    )

    done = run("explain", *LAYER, "--engine", "acme", *HOPPER, "--json")

    (choice,) = done.json["engines"][0]["choices"]
    assert choice["same_kernels"] is False
    assert any(why in line for line in choice["why"]), choice["why"]


def test_json_has_both_choices(run, add) -> None:
    add()

    done = run("explain", *LAYER, "--engine", "acme", *HOPPER, "--device", "cpu", "--json")

    hopper, cpu = done.json["engines"]
    assert (hopper["engine"], hopper["device"]["type"], cpu["device"]["type"]) == ("Acme 2.1", "cuda", "cpu")
    (choice,) = hopper["choices"]
    assert (choice["chosen"], choice["attnplug"], choice["same_kernels"]) == ("OLD", "flash/old", True)
    assert [each["name"] for each in choice["backends"]] == ["FAST", "OLD", "SLOW"]
    assert choice["backends"][0]["reasons"] == ["needs 8 heads"]
    assert len(done.json["explanations"]) == 2


def test_a_warning_of_the_engine_is_on_standard_error(run, add) -> None:
    add(SOUND.replace("WARNINGS = ()", 'WARNINGS = ("2.1 is not tested",)'))

    done = run("explain", *LAYER, "--engine", "acme", *HOPPER, "--device", "cpu")

    assert done.err == "attnplug: warning: 2.1 is not tested\n"
    assert done.code == 0


def test_an_engine_is_not_imported_without_the_option(run, add) -> None:
    add("raise AssertionError")

    assert run("explain", *LAYER, *HOPPER).code == 0
    assert run("list", "--json").code == 0


def test_this_projects_engine_that_is_missing(run, empty) -> None:
    done = run("explain", *LAYER, "--engine", "vllm", "--json")

    assert done.code == 2
    assert done.json["error"]["type"] == "RequestError"
    assert done.json["error"]["problem"] == "the engine 'vllm' is not installed"
    assert "pip install ./hosts/vllm" in done.json["error"]["fix"]
    assert "in the environment of vLLM" in done.json["error"]["fix"]


def test_an_unknown_engine_suggests_the_nearest(run, add) -> None:
    add()

    done = run("explain", *LAYER, "--engine", "acne")

    assert done.code == 2
    assert "the engine 'acne' was given; did you mean 'acme'?" in done.err
    assert "expected: the engines are acme, diffusers, sglang, torch, vllm\n" in done.err


@pytest.mark.parametrize(("source", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_one_that_is_named_fails_with_its_fix(run, add, source: str, problem: str) -> None:
    add(source)

    done = run("explain", *LAYER, "--engine", "acme", *HOPPER)

    assert (done.code, done.out) == (1, "")
    assert f"the engine 'acme' of acme-engine 2.0 {problem}" in done.err.replace("diagnose of ", "")
    assert "\n  fix: " in done.err


@pytest.mark.parametrize(("body", "problem"), FAILING.values(), ids=FAILING)
def test_one_that_fails_is_an_error_of_its_authors(run, add, body: str, problem: str) -> None:
    add(SOUND.replace("def choose(requirements, device, *, assume_installed):", f"def choose(*_, **__):\n    {body}"))

    done = run("explain", *LAYER, "--engine", "acme", *HOPPER)

    assert (done.code, done.out) == (1, "")
    assert "the engine 'acme' of acme-engine 2.0" in done.err
    assert problem in done.err


def test_a_choice_for_each_request_is_expected(run, add) -> None:
    add(SOUND.replace("for each in requirements]", "for each in (*requirements, *requirements)]"))

    done = run("explain", *LAYER, "--engine", "acme", *HOPPER)

    assert "choose of the engine 'acme' of acme-engine 2.0 returned 2 choices for 1 requests" in done.err


def test_an_error_of_this_project_passes_through(run, add) -> None:
    error = "from attnplug.errors import RequestError\n    raise RequestError('no XPU', 'cpu or cuda', 'name one')"
    add(SOUND.replace("    chosen = [", f"    {error}\n    chosen = ["))

    done = run("explain", *LAYER, "--engine", "acme", *HOPPER)

    assert (done.code, done.err) == (2, "attnplug: no XPU\n  expected: cpu or cuda\n  fix: name one\n")


def test_two_distributions_with_one_engine_are_both_named(run, add) -> None:
    add()
    add(distribution="rival-engine")

    done = run("explain", *LAYER, "--engine", "acme")

    assert done.err.startswith("attnplug: the engine 'acme' is offered by acme-engine 2.0 and by rival-engine 2.0\n")
    assert "expected: an engine belongs to one distribution" in done.err


@pytest.mark.parametrize("load", [True, False])
def test_doctor_lists_what_an_engine_says(run, add, load: bool) -> None:
    add()

    words = ["--load"] * load
    done = run("doctor", *words) if load else run("doctor", "--all")

    assert f"\nengines\n    acme  (acme-engine 2.0)\n      load={load}\n" in done.out
    assert run("doctor", "--json", *words).json["engines"] == [
        {
            "name": "acme",
            "distributions": ["acme-engine 2.0"],
            "lines": [f"load={load}"],
            "warnings": [],
            "problems": [],
        }
    ]


def test_doctor_lists_problems_and_warnings_of_an_engine(run, add) -> None:
    add(
        SOUND.replace("WARNINGS = ()", 'WARNINGS = ("2.1 is not tested",)').replace(
            "PROBLEMS = ()", 'PROBLEMS = (("it sees no backend", "set ACME_PLUGINS"),)'
        )
    )

    done = run("doctor", "--json")

    assert done.code == 1
    assert {"subject": "engine acme", "what": "it sees no backend", "fix": "set ACME_PLUGINS"} in done.json["problems"]
    assert "2.1 is not tested" in done.json["warnings"]


@pytest.mark.parametrize(("source", "problem"), BROKEN.values(), ids=BROKEN)
def test_doctor_lists_a_broken_one_and_hides_no_other(run, add, source: str, problem: str) -> None:
    add(source)
    add(name="other", distribution="other-engine")

    done = run("doctor", "--json")

    (found,) = [each for each in done.json["problems"] if each["subject"] == "engine acme"]
    assert f"the engine 'acme' of acme-engine 2.0 {problem}" in found["what"].replace("diagnose of ", "")
    assert found["fix"]
    assert [each["name"] for each in done.json["engines"]] == ["acme", "other"]
    assert done.json["engines"][1]["lines"] == ["load=False"]


def test_texts_of_an_engine_steer_no_terminal(run, add) -> None:
    hostile = SOUND.replace("needs 8 heads", "\\x1b[2J").replace("Acme 2.1", "\\u202eAcme").replace("load=", "\\x07")
    add(hostile.replace('"OLD"', '"O\\rD"').replace("WARNINGS = ()", 'WARNINGS = ("\\x9b",)'))

    for words in (("explain", *LAYER, *HOPPER, "--engine", "acme"), ("doctor",)):
        for more in ((), ("--json",)):
            done = run(*words, *more)
            assert not set(done.out + done.err) & set("\x1b\u202e\x07\r\x9b"), words
            assert done.code == 0


def test_the_known_engines_name_their_distribution() -> None:
    assert engine.KNOWN == {
        "diffusers": ("diffusers", "attnplug-diffusers"),
        "sglang": ("SGLang", "attnplug-sglang"),
        "torch": ("torch", "attnplug-torch"),
        "vllm": ("vLLM", "attnplug-vllm"),
    }
