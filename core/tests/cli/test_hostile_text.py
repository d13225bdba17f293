"""Text that others wrote, with characters that steer a terminal: no command prints them, wherever they come from."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import attnplug
from attnplug._escape import escaped
from attnplug.cli import device_report
from attnplug.cli.main import main
from attnplug.commands import describe_error, say_json
from attnplug.errors import ManifestError, NoBackendError, SettingsError
from attnplug.request.device import Device
from tests.command import Site

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.unmeasured

STEERING = [
    *("\x00", "\x07", "\x08", "\n", "\r", "\t", "\x1b[2J", "\x1b]0;title\x07", "\x7f", "\x85", "\x9b31m"),
    *("\u061c", "\u200b", "\u200e", "\u200f", "\u2028", "\u2029", "\u202a", "\u202e", "\u2066", "\u2069", "\ufeff"),
    *("\udc80", "\ud800", "\U000e0041"),
]
MARKUP = ["[bold red]", "[/]", "[link=file:///]", ":warning:", "\\", "%", "%(prog)s", "{}"]
HOSTILE = st.lists(st.sampled_from([*STEERING, *MARKUP, "a", " "]) | st.characters(), min_size=1, max_size=5).map(
    "".join
)
ON_DISK = HOSTILE.filter(lambda text: not set(text) & set("\x00/") and _encodes(text))
WRITTEN = HOSTILE.filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))  # TOML and files are UTF-8
LAYER = ("--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "8", "--dtype", "bfloat16")
COMMANDS = (
    ("list",),
    ("list", "--json"),
    ("explain", *LAYER),
    ("explain", *LAYER, "--json"),
    ("explain", *LAYER, "--device", "cpu", "--device", "cuda:9.0", "--assume-installed"),
    ("doctor",),
    ("doctor", "--json"),
    ("--help",),
    ("greet", "--help"),
)
MANIFEST = """\
api = "1.0"
backend = {{ name = "mine", aliases = [], summary = {text} }}
[supports]
device_type = ["cpu", "cuda"]
compute_capability = {{ min = "8.0" }}
dtype = "bfloat16"
head_size = {{ min = 1 }}
features = ["sinks"]
[[rules]]
when = {{ head_size = 64 }}
because = {text}
[variants.one]
summary = {text}
requires = ["nothing-like-it"]
install = {{ nothing-like-it = {text} }}
[variants.two]
emulates = {{ sinks = {text} }}
[options.ratio]
type = "int"
default = 1
help = {text}
"""
property_test = settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


def _encodes(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(*words: str, stream: type[io.StringIO] = io.StringIO) -> str:
    """Return what a command prints, to both streams."""
    with ExitStack() as stack:
        out, err = stack.enter_context(redirect_stdout(stream())), stack.enter_context(redirect_stderr(stream()))
        # Rich writes the escapes of its styles only where it sees a terminal that has any.
        stack.enter_context(patch.dict(os.environ, {"TERM": "dumb", "COLUMNS": "80"}))
        attnplug.refresh()
        main(words)
    if "--json" in words and out.getvalue():
        data = json.loads(out.getvalue())
        lines = [text for error in _errors(data) for text in (error["problem"], error["expected"], error["fix"])]
        assert all(text.isprintable() or (text in lines and _harmless(text)) for text in _texts(data))
    return out.getvalue() + err.getvalue()


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, (dict, list)):
        for item in (*data, *(data.values() if isinstance(data, dict) else ())):
            yield from _texts(item)


def _errors(data: Any) -> Iterator[dict[str, str]]:
    """Yield the errors, the only texts that may have several lines."""
    found = [data, *(plan for plan in data.get("plans", ()))]
    yield from (each["error"] for each in found if each.get("error"))


def _harmless(text: str) -> bool:
    return all(c == "\n" or c.isprintable() for c in text)


def check(*more: tuple[str, ...]) -> None:
    """Check every command, on a terminal and off it."""
    for words in (*COMMANDS, *more):
        for stream in (io.StringIO, _Terminal):
            text = shown(*words, stream=stream)
            assert _harmless(text), (words, stream, text)


def wipe(site: Site) -> None:
    """Remove what an earlier example has installed."""
    for path in site.folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@property_test
@given(WRITTEN)
@example("\x1b[2J\u202e[bold]x[/] :warning:\n")
def test_what_a_manifest_says(empty: Site, text: str) -> None:
    wipe(empty)
    empty.add("mine", MANIFEST.format(text=_toml(f"x{text}")))

    assert "mine/one" in shown("list")  # the manifest is valid
    check(("explain", *LAYER, "--option", "mine.ratio=x"), ("explain", *LAYER, "--backend", "mine/one"))


def _toml(text: str) -> str:
    return '"' + "".join(f"\\U{ord(c):08x}" for c in text) + '"'


@property_test
@given(WRITTEN)
@example("\x1b[2J\u202e")
def test_names_and_versions_of_distributions_and_backends(empty: Site, text: str) -> None:
    wipe(empty)
    folder = empty.folder / "mine-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {text}\nVersion: {text}\n", encoding="utf-8")
    points = (
        f"[attnplug.backends]\n{text} = {text}\nmine = {text}\n[attnplug.commands]\n{text} = {text}\ngreet = {text}"
    )
    (folder / "entry_points.txt").write_text(points, encoding="utf-8")

    check(("explain", *LAYER, "--backend", text))


@property_test
@given(WRITTEN)
@example("\x1b[2J\u202e")
def test_the_summary_and_the_failure_of_a_command(empty: Site, text: str) -> None:
    wipe(empty)
    empty.metadata("acme", "1.0", "[attnplug.commands]\ngreet = scratch_greet\nfail = scratch_fail\n")
    source = f"SUMMARY = {_toml(text)}\ndef add_arguments(parser): ...\ndef run(arguments): raise SystemExit(SUMMARY)\n"
    (empty.folder / "scratch_greet.py").write_text(source)
    (empty.folder / "scratch_fail.py").write_text(f"raise OSError({_toml(text)})")
    for name in ("scratch_greet", "scratch_fail"):
        sys.modules.pop(name, None)

    check(("greet",), ("fail",), ("fail", "--json"))


@property_test
@given(ON_DISK)
@example("\x1b[2J\u202e\udc80")
def test_folders(tmp_path: Path, empty: Site, text: str) -> None:
    wipe(empty)
    place = tmp_path / f"x{text}"
    place.mkdir(exist_ok=True)
    site = Site(place)
    name = f"n{len(list(tmp_path.iterdir()))}"
    shutil.rmtree(place)
    place.mkdir()
    site.add(name, "api = 3")
    (place / "config.toml").write_text("strict = 'yes'")
    (place / "~orch-1.0.dist-info").mkdir()
    path = [*sys.path, str(place)]

    with patch.object(sys, "path", path):
        check(("explain", "--config", str(place)), ("explain", "--requirements", f"@{place}"))
        with patch.dict(os.environ, {"ATTNPLUG_CONFIG": str(place / "config.toml")}):
            check()
        with patch.dict(os.environ, {"XDG_CONFIG_HOME": str(place), "ATTNPLUG_EVIDENCE": str(place)}):
            check()


@property_test
@given(HOSTILE)
@example("\x1b[2J\u202e\udc80\n[bold]x")
def test_the_device(empty: Site, text: str) -> None:
    with patch.object(device_report.Device, "current", lambda: Device.cuda("9.0", name=text)):
        check()


@property_test
@given(ON_DISK, st.sampled_from(["BACKEND", "ALLOW", "BLOCK", "STRICT", "PROFILE", "EVIDENCE", "KV_LAYOUT", "CONFIG"]))
@example("\x1b[2J\u202e\udc80", "PROFILE")
@example("\x1b[2J\u202e\udc80", "STRICT")
@example("\x1b[2J\u202e\udc80", "BACKEND")
def test_settings_of_the_environment(empty: Site, text: str, name: str) -> None:
    with patch.dict(os.environ, {f"ATTNPLUG_{name}": text}):
        check()


@property_test
@given(ON_DISK.filter(lambda text: "=" not in text))
@example("\x1b[2J\u202e\udc80")
def test_options_and_devices_of_the_environment(empty: Site, text: str) -> None:
    named = {f"ATTNPLUG_OPT_TORCH__{text}": text, f"ATTNPLUG_{text}": text, "CUDA_VISIBLE_DEVICES": text}
    with patch.dict(os.environ, named):
        check()


@property_test
@given(HOSTILE)
@example("\x1b[2J\u202e\udc80")
def test_the_command_line(empty: Site, text: str) -> None:
    for words in (
        (text,),
        ("list", text),
        ("explain", "--requirements", text),
        ("explain", *LAYER, "--device", text),
        ("explain", *LAYER, "--option", text),
        ("explain", *LAYER, "--backend", text, "--json"),
    ):
        assert _harmless(shown(*words)), words


def test_nothing_is_left_out(empty: Site) -> None:
    empty.add("mine", MANIFEST.format(text='"a\\u001b[2Jb\\u202ec\\n[bold]d[/] :warning:"'))

    for stream in (io.StringIO, _Terminal):
        text = shown("list", stream=stream)
        assert r"a\x1b[2Jb\u202ec\n[bold]d[/] :warning:" in text
    assert r"a\x1b[2Jb\u202ec\n[bold]d[/] :warning:" in _texts(json.loads(shown("list", "--json")))


def test_errors_keep_their_lines_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"error": describe_error(NoBackendError("a\x1b", "b\nc\x9b", "d\ne")), "other": "f\ng"})

    data = json.loads(capsys.readouterr().out)
    error = {"type": "NoBackendError", "problem": "a\\x1b", "expected": "b\nc\\x9b", "fix": "d\ne"}
    assert data == {"schema_version": 1, "error": error, "other": "f\\ng"}


def test_a_line_cannot_be_forged(empty: Site) -> None:
    empty.add("mine", MANIFEST.format(text='"a\\nmine/one  ready"'))

    assert not any(line.startswith("mine/one  ready") for line in shown("list").splitlines())
    assert not any(line.startswith("mine/one  ready") for line in shown("explain", *LAYER).splitlines())


def test_warnings_that_are_logged(start, empty: Site, tmp_path: Path) -> None:
    file = tmp_path / "a\x1b[2J.toml"
    file.write_text("block = 'nobody'")

    done = start("-m", "attnplug", "list", ATTNPLUG_CONFIG=str(file))

    assert "'nobody' in the setting block (file " in done.err
    assert r"a\x1b[2J.toml" in done.err
    assert "\x1b" not in done.out + done.err


@given(HOSTILE)
def test_the_text_of_errors(text: str) -> None:
    errors = (
        SettingsError(text, text, text),
        ManifestError(text, text, text, text, 3),
        NoBackendError(text, text, text),
    )

    assert all(_harmless(str(error)) for error in errors)
    assert errors[0].problem == text


@given(st.text(st.characters()))
def test_escaping_is_that_of_repr(text: str) -> None:
    quoted = escaped(text).replace("'", "")
    by_repr = "".join(repr(c)[1:-1] if not c.isprintable() else c for c in text)

    assert quoted == by_repr.replace("'", "")
    assert escaped(escaped(text)) == escaped(text)


@pytest.mark.parametrize("text", ["plain", "Straße", "注意", "✓ …", ""])
def test_printable_text_stays_as_it_is(text: str) -> None:
    assert escaped(text) == text
