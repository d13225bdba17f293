"""Commands that distributions add by entry points: listed, run, and harmless where they are broken."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from attnplug.cli import BUILT_IN, command
from attnplug.cli.command import KNOWN, missing_commands

if TYPE_CHECKING:
    from collections.abc import Callable

SOUND = """\
SUMMARY = "says hello"

def add_arguments(parser):
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--name", default="you", help="whom to greet")

def run(arguments):
    print(f"hello {arguments.name}")
    return 1
"""
LACKING = 'SUMMARY = "says nothing"\n\ndef add_arguments(parser): ...\n'
BROKEN = {
    "raises": ("raise OSError('no such library')", "cannot be imported: OSError: no such library"),
    "exits": ("raise SystemExit('imported')", "cannot be imported: SystemExit: imported"),
    "does not parse": ("def", "cannot be imported: SyntaxError"),
    "lacks a member": (LACKING, "lacks run"),
    "raises no Exception": ("raise type('Odd', (BaseException,), {})('why')", "cannot be imported: Odd: why"),
    "raises what cannot be printed": (
        "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
        "cannot be imported: Odd (its text cannot be shown: str() of it raises ZeroDivisionError)",
    ),
    "has a summary that is no text": (SOUND.replace('"says hello"', "7"), "is of the type int"),
    "cannot run": (SOUND.replace("def run", "def run_").replace("return 1", "return 1\nrun = 3"), "is of the type int"),
    "cannot declare": (SOUND.replace("def add_arguments", "add_arguments = None\ndef _"), "is of the type NoneType"),
    "is lazy and fails": ("def __getattr__(name): raise ImportError(name)", "cannot be imported: ImportError: SUMMARY"),
}


@pytest.fixture
def add(empty) -> Callable[..., None]:
    """Return ``add(name, source, distribution)``, which installs a command."""

    def install(name: str, source: str = SOUND, distribution: str = "acme-tools", module: str = "") -> None:
        module = module or f"scratch_{distribution.replace('-', '_')}_{name}"
        (empty.folder / f"{module}.py").write_text(source)
        empty.metadata(distribution, "2.0", f"[attnplug.commands]\n{name} = {module}\n")

    return install


def test_a_command_is_listed_and_runs(run, add) -> None:
    add("greet")

    assert "  greet    says hello\n" in run("--help").out
    done = run("greet", "--name", "vLLM")
    assert (done.code, done.out) == (1, "hello vLLM\n")


def test_its_options_are_checked_and_described(run, add) -> None:
    add("greet")

    assert "'--nme' is not an option; did you mean '--name'?" in run("greet", "--nme", "x").err
    described = run("greet", "--help")
    assert described.code == 0
    assert described.out.startswith("usage: attnplug greet [options]\n\nsays hello.\n")


def test_nothing_of_it_is_imported_for_another_command(run, add) -> None:
    add("greet", "raise AssertionError")

    assert run("list", "--json").code == 0


@pytest.mark.parametrize(("source", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_one_is_listed_and_hides_no_other(run, add, source: str, problem: str) -> None:
    add("greet", source)
    add("other", distribution="other-tools")

    listed = run("--help")

    assert listed.code == 0
    (line,) = [line for line in listed.out.replace("\n           ", " ").splitlines() if line.startswith("  greet")]
    assert line.startswith("  greet    broken: ")
    assert f"the command 'greet' of acme-tools 2.0 {problem}" in line
    assert "  other    says hello\n" in listed.out


@pytest.mark.parametrize(("source", "problem"), BROKEN.values(), ids=BROKEN)
def test_a_broken_one_that_is_run_fails_with_its_fix(run, add, source: str, problem: str) -> None:
    add("greet", source)

    done = run("greet")

    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("attnplug: ")
    assert f"the command 'greet' of acme-tools 2.0 {problem}" in done.err.partition("\n")[0]
    assert "\n  fix: " in done.err


@pytest.mark.parametrize("value", ["", ".relative", "attnplug.commands:say", "a" * 300, "no module", "x\0y"])
def test_a_value_that_is_no_module_is_broken(run, empty, value: str) -> None:
    empty.metadata("acme-tools", "2.0", f"[attnplug.commands]\ngreet = {value}\n")

    assert "  greet    broken: the command 'greet' of acme-tools 2.0 cannot be " in run("--help").out
    assert run("greet").code == 1


@pytest.mark.parametrize("odd", ["ValueError('why')", "type('Odd', (BaseException,), {})('why')", "SystemExit('why')"])
def test_options_that_cannot_be_declared_are_an_error(run, add, odd: str) -> None:
    add("greet", SOUND.replace('parser.add_argument("--name"', f'raise {odd}\n    print("--name"'))

    done = run("greet")

    assert (done.code, done.out) == (1, "")
    assert "of acme-tools 2.0 cannot declare its options: add_arguments raised" in done.err
    assert "  fix: reinstall or remove acme-tools\n" in done.err


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ("1 / 0", "'greet' of acme-tools 2.0 raised ZeroDivisionError"),
        ("(_ for _ in ()).throw(GeneratorExit)", "'greet' of acme-tools 2.0 raised GeneratorExit"),
        ("None", "'greet' of acme-tools 2.0 returned a NoneType"),
        ("'done'", "'greet' of acme-tools 2.0 returned a str"),
    ],
)
def test_a_command_that_fails_is_an_error_of_its_authors(run, add, returned: str, problem: str) -> None:
    add("greet", SOUND.replace("return 1", f"return {returned}"))

    done = run("greet")

    assert done.code == 1
    assert f"{problem}" in done.err
    assert "\n  fix: " in done.err


def test_one_distribution_that_offers_a_command_twice(run, empty) -> None:
    empty.metadata("acme-tools", "2.0", "[attnplug.commands]\ngreet = one\ngreet = other\n")

    assert "broken: the command 'greet' is offered by acme-tools 2.0 and by acme-tools 2.0\n" in run("--help").out
    assert "install acme-tools again, in a version that offers 'greet' once" in run("greet").err


def test_commands_of_a_distribution_that_cannot_be_read(run, empty, add) -> None:
    add("other", distribution="other-tools")
    empty.metadata("acme-tools", "9" * 5, "[attnplug.commands]\ngreet = one\n")
    (metadata,) = empty.folder.glob("acme_tools*/METADATA")
    metadata.unlink()
    os.mkfifo(metadata)

    listed = run("--help").out.replace("\n           ", " ")

    assert "broken: the command 'greet' of acme_tools 99999 cannot be used: its METADATA cannot be read" in listed
    assert "  other    says hello\n" in listed


def test_5000_commands_are_one_broken_distribution(run, empty, add) -> None:
    add("other", distribution="other-tools")
    points = "".join(f"c{number} = m{number}\n" for number in range(5000))
    empty.metadata("acme-tools", "2.0", f"[attnplug.commands]\n{points}")

    listed = run("--help").out

    assert listed.count("broken: ") <= 100
    assert "offers 5,000 entry points" in listed
    assert "says hello\n" in listed


def test_a_module_that_is_not_there_is_broken(run, empty) -> None:
    empty.metadata("acme-tools", "2.0", "[attnplug.commands]\ngreet = nowhere.commands\n")

    assert "broken: the command 'greet' of acme-tools 2.0 cannot be imported: ModuleNotFoundError" in run("--help").out


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_command_cannot_be_replaced(run, add, name: str) -> None:
    add(name)

    listed = run("--help").out
    assert f"  {name} of acme-tools 2.0 is ignored: a built-in command cannot be replaced\n" in listed
    assert "says hello" not in listed
    assert run(name, "--help").out.startswith(f"usage: attnplug {name} [")
    assert "hello" not in run(name, "--help").out


def test_two_distributions_with_one_command_are_both_named(run, add) -> None:
    add("greet")
    add("greet", distribution="rival-tools")

    conflict = "the command 'greet' is offered by acme-tools 2.0 and by rival-tools 2.0"
    assert f"  greet    broken: {conflict}\n" in run("--help").out
    done = run("greet")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        f"attnplug: {conflict}\n"
        "  expected: a command belongs to one distribution\n"
        "  fix: uninstall all but one of them\n"
    )


@pytest.mark.parametrize(("word", "near"), [("lst", "list"), ("gret", "greet"), ("demmo", "demo")])
def test_an_unknown_word_suggests_the_nearest_command(run, add, word: str, near: str) -> None:
    add("greet")

    done = run(word)

    assert (done.code, done.out) == (2, "")
    assert f"the command {word!r} was given; did you mean {near!r}?" in done.err
    assert "expected: the commands are list, explain, plan, options, doctor, " in done.err


def test_a_word_like_no_command_suggests_none(run, add) -> None:
    assert "did you mean" not in run("zzz").err


def test_a_command_that_ends_with_a_text_prints_it(run, add) -> None:
    add("greet", SOUND.replace('print(f"hello {arguments.name}")', 'raise SystemExit("nobody is there")'))

    done = run("greet")

    assert (done.code, done.out, done.err) == (1, "", "nobody is there\n")


def test_what_is_not_installed_is_one_line_with_what_to_install(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "installed_commands", dict)

    listed = run("--help").out
    done = run("bench")

    ours = "check, new, bench, tune, report, replay, trace: install attnplug-kit"
    assert f"\nnot installed:\n  {ours}\n  demo: install attnplug-transformers\n" in listed
    assert done.code == 2
    assert done.err.startswith("attnplug: the command 'bench' is not installed\n  expected: it is a command of")
    assert "pip install ./kit" in done.err


def test_what_is_installed_is_not_called_missing(run) -> None:
    names = [name for names in KNOWN.values() for name in names]

    assert list(missing_commands(names)) == []
    assert "not installed:" not in run("--help").out


def test_json_carries_the_failure_of_a_command(run, add) -> None:
    add("greet", "raise OSError('gone')")

    error = run("greet", "--json").json["error"]

    assert error["type"] == "PluginLoadError"
    assert error["fix"] == "reinstall or remove acme-tools"
