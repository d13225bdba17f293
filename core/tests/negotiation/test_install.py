"""The command that installs what is missing: exact in a shell, and never one that runs or downloads something else."""

from __future__ import annotations

import shlex
import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from packaging.requirements import Requirement

from attnplug.discovery.candidates import NameConflict
from attnplug.discovery.names import clash
from attnplug.discovery.plugin import BY_HAND, Plugin
from attnplug.negotiation import Fix
from attnplug.negotiation.install import is_command

WORD = st.text(string.ascii_letters + string.digits, min_size=1, max_size=4)
NAME = st.lists(WORD, min_size=1, max_size=3).flatmap(lambda parts: st.sampled_from("-_.").map(lambda c: c.join(parts)))
VERSION = st.lists(st.integers(0, 99).map(str), min_size=1, max_size=3).map(".".join)
BOUND = st.tuples(st.sampled_from(["<", "<=", "!=", "==", ">=", ">"]), st.sampled_from(["", " "]), VERSION).map("".join)
SUFFIX = st.sampled_from(["", ".*", "+cu128", "rc1"])
EXACT = st.tuples(st.just("=="), VERSION, SUFFIX).map("".join)
BOUNDS = st.lists(BOUND | EXACT, max_size=2).map(",".join)
EXTRAS = st.lists(NAME, max_size=2).map(lambda names: f"[{','.join(names)}]" if names else "")
QUOTE = st.sampled_from("'\"")
CLAUSE = st.tuples(
    st.sampled_from(["python_version", "sys_platform", "platform_machine"]),
    st.sampled_from([" > ", "<", " == ", " != ", " in "]),
    QUOTE.flatmap(lambda quote: st.tuples(st.just(quote), WORD | VERSION, st.just(quote)).map("".join)),
).map("".join)
JOINED = st.tuples(CLAUSE, st.sampled_from([" and ", " or "]), CLAUSE).map("".join)
MARKER = st.just("") | st.sampled_from([";", " ; "]).flatmap(lambda sign: (CLAUSE | JOINED).map(lambda m: f"{sign}{m}"))


def is_defined(text: str) -> bool:
    """Whether the marker of a requirement can be compared: releases of packaging differ about strings."""
    marker = Requirement(text).marker
    try:
        return marker is None or marker.evaluate() in (True, False)
    except ValueError:  # undefined, or the environment's value is no version
        return False


REQUIREMENT = st.tuples(NAME, EXTRAS, st.sampled_from(["", " "]), BOUNDS, MARKER).map("".join).filter(is_defined)


@given(st.lists(REQUIREMENT, min_size=1, max_size=4))
def test_a_shell_reads_the_requirements_as_they_are(requirements: list[str]) -> None:
    command = str(Fix(install=tuple(requirements)))

    words = shlex.split(command)
    assert words == ["pip", "install", *requirements]
    assert [Requirement(word) for word in words[2:]] == [Requirement(text) for text in requirements]


@pytest.mark.parametrize(
    ("requirement", "command"),
    [
        ("torch", "pip install torch"),
        ("flash-new >=4", "pip install 'flash-new >=4'"),
        ("torch[opt]==2.11.0+cpu", "pip install 'torch[opt]==2.11.0+cpu'"),
        ("baz; python_version > '3'", """pip install 'baz; python_version > '"'"'3'"'"''"""),
        ('baz; python_version > "3"', """pip install 'baz; python_version > "3"'"""),
    ],
)
def test_what_is_quoted(requirement: str, command: str) -> None:
    assert str(Fix(install=(requirement,))) == command


@pytest.mark.parametrize(
    ("requirement", "why"),
    [
        ("evil @ https://example.com/evil.whl", "it names a URL"),
        ("evil@https://example.com/evil.whl", "it names a URL"),
        ("evil @ file:///tmp/evil.whl", "it names a URL"),
        ("evil @ git+https://example.com/$(id)", "it names a URL"),
        ("evil===$id", "it holds syntax of a shell"),
        ("evil===`id`", "it holds syntax of a shell"),
        ("evil; python_version > '3$(id)'", "it holds syntax of a shell"),
        ("evil; sys_platform == 'a&b|c'", "it holds syntax of a shell"),
        ("evil; sys_platform == 'a\x1b[2J'", "it holds characters that are not printable"),
        ("evil ; rm -rf ~", "it is not a valid requirement"),
        ("evil && id", "it is not a valid requirement"),
        ("--index-url=https://example.com", "it is not a valid requirement"),
        ("-e.", "it is not a valid requirement"),
        ("https://example.com/evil.whl", "it is not a valid requirement"),
        ("./evil", "it is not a valid requirement"),
        ("", "it is not a valid requirement"),
    ],
)
def test_what_is_no_command(requirement: str, why: str) -> None:
    alone, beside = str(Fix(install=(requirement,))), str(Fix(install=("torch", requirement, "numpy")))

    assert alone == f"install {requirement!r} by hand, if you trust it: {why}, so that no command is offered"
    assert beside == f"pip install torch numpy; {alone}"


@pytest.mark.parametrize("after", ["  # ; touch x", " # x", "  # `id`", "; id", " && id", " | sh"])
def test_nothing_follows_a_command_of_a_manifest(after: str) -> None:
    assert is_command("pip install --no-build-isolation 'flash-attn >=2.7'")
    assert not is_command(f"pip install --no-build-isolation 'flash-attn >=2.7'{after}")


@given(st.text())
def test_any_text_is_offered_exactly_or_not_at_all(text: str) -> None:
    shown = str(Fix(install=(text,)))

    if shown.startswith("pip install"):
        assert shlex.split(shown) == ["pip", "install", text]
        assert Requirement(text).url is None
    else:
        assert shown.startswith(f"install {text!r} by hand")


@given(st.text(min_size=1))
def test_names_in_suggested_settings_are_quoted(name: str) -> None:
    assume("\x00" not in name)
    rivals = (Plugin("one", "a.plugin", "sound", "1.0"), Plugin("one", "b.plugin", name, "1.0"))

    for text in (
        clash(Plugin("one", "c.plugin", BY_HAND, ""), rivals[1]).fix,
        *(NameConflict("one", rivals).fix,) * (name != "sound"),
    ):
        assert f"ATTNPLUG_BLOCK={shlex.quote(name)}" in text
