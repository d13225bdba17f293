"""Reading a file without trusting it: regular, of limited size, and never blocking."""

from __future__ import annotations

import os
import socket
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.errors import SettingsError
from attnplug.request import files
from attnplug.request.files import read_bytes, read_capped, read_head, read_text
from attnplug.request.settings import Settings, parse_toml
from attnplug.selection.options import read_profile

if TYPE_CHECKING:
    from collections.abc import Callable


def bound_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(path))


ODD: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "null device": lambda path: path.symlink_to("/dev/null"),
    "terminal": lambda path: path.symlink_to(os.ttyname(os.openpty()[1])),
    "socket": bound_socket,
    "loop": lambda path: path.symlink_to(path),
}


@pytest.fixture
def read_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of everything that is read from now on."""
    sizes: list[int] = []
    real = os.read

    def read(descriptor: int, size: int) -> bytes:
        content = real(descriptor, size)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(files.os, "read", read)
    return sizes


@pytest.mark.parametrize("kind", ODD)
def test_only_regular_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_sizes: list, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)
    ODD[kind](tmp_path / "odd")

    with pytest.raises(OSError, match=r"odd"):
        read_bytes(tmp_path / "odd", 100)
    assert read_sizes == []


def test_what_is_opened_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, fifo = tmp_path / "file", tmp_path / "fifo"
    path.write_bytes(b"content")
    os.mkfifo(fifo)
    real = os.fstat

    def swap(descriptor: int) -> os.stat_result:
        if fifo.exists():
            path.rename(tmp_path / "old")
            fifo.rename(path)
        return real(descriptor)

    monkeypatch.setattr(files.os, "fstat", swap)
    assert read_bytes(path, 100) == b"content"


@pytest.mark.parametrize("kind", ODD)
def test_beginnings_are_those_of_regular_files(tmp_path: Path, monkeypatch, read_sizes: list, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    ODD[kind](tmp_path / "odd")

    with pytest.raises(OSError, match=r"odd"):
        read_head(tmp_path / "odd", 100)
    assert read_sizes == []


@given(st.binary(max_size=300), st.integers(0, 400))
def test_a_beginning_is_that_of_the_file(tmp_path_factory, content: bytes, size: int) -> None:
    path = tmp_path_factory.mktemp("head") / "file"
    path.write_bytes(content)

    assert read_head(path, size) == content[:size]


def test_a_large_file_is_read_as_far_as_requested(tmp_path: Path, read_sizes: list[int]) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**32)

    assert read_head(tmp_path / "large", 2**21 + 1) == bytes(2**21 + 1)
    assert sum(read_sizes) == 2**21 + 1


def test_every_descriptor_is_closed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 9)
    before = len([*Path("/proc/self/fd").iterdir()])

    for largest in (9, 8):
        for name in ("file", ""):
            for read in (read_bytes, read_head):
                try:
                    read(tmp_path / name, largest)
                except OSError:
                    continue
    assert len([*Path("/proc/self/fd").iterdir()]) == before


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 5000])
def test_a_file_has_at_most_the_limit(tmp_path: Path, read_sizes: list[int], size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)

    if size <= 100:
        assert read_bytes(tmp_path / "file", 100) == content
        assert sum(read_sizes) == size
    else:
        with pytest.raises(OSError, match="larger than"):
            read_bytes(tmp_path / "file", 100)
        assert read_sizes == []  # its size says enough


def test_a_file_that_grows_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"x")
    sizes: list[int] = []
    monkeypatch.setattr(files.os, "read", lambda _, size: sizes.append(size) or b"x" * size)

    with pytest.raises(OSError, match="larger than 2 KiB"):
        read_bytes(tmp_path / "file", 2048)
    assert sum(sizes) == 2049


def test_a_file_without_a_size_is_read(read_sizes: list[int]) -> None:
    assert b"Name" in read_bytes("/proc/self/status", 2**20)
    with pytest.raises(OSError, match="larger than 1 KiB"):
        read_bytes("/proc/self/smaps", 1024)
    assert read_sizes[-1] <= 1025


@given(st.lists(st.binary(max_size=50)), st.integers(0, 200), st.integers(0, 100))
def test_parts_are_joined_up_to_the_limit(parts: list[bytes], largest: int, expected: int) -> None:
    whole = b"".join(parts)
    at = 0

    def read(size: int) -> bytes:
        nonlocal at
        at += len(found := whole[at : at + size])
        return found

    if len(whole) <= largest:
        assert read_capped(read, "it", largest, expected) == whole
    else:
        with pytest.raises(OSError, match="larger than"):
            read_capped(read, "it", largest, expected)
    assert at <= largest + 1


def test_a_stream_that_never_ends_is_bounded() -> None:
    stream = repeat(b"x" * 100)
    with pytest.raises(OSError, match="larger than 10 KiB"):
        read_capped(lambda size: next(stream)[:size], "it", 10_240)


@pytest.mark.parametrize("content", [b"a\r\nb\rc\n", "\u00e4\u20ac".encode(), b""])
def test_text_is_what_python_reads(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)

    assert read_text(tmp_path / "file", 100) == (tmp_path / "file").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", [*ODD, "large"])
def test_settings_are_read_from_regular_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "large":
        with (tmp_path / "odd").open("wb") as file:
            file.truncate(50 * 2**20)
    else:
        ODD[kind](tmp_path / "odd")

    with pytest.raises(SettingsError, match=r"the configuration file '.*odd' cannot be read") as caught:
        Settings.read({}, tmp_path / "odd")
    assert caught.value.fix
    with pytest.raises(SettingsError, match=r"the profile '.*odd' is set"):
        read_profile(str(tmp_path / "odd"))


# TOML


@pytest.mark.parametrize(
    "text",
    [
        f"a{'.a' * 40} = 1",
        f"a{' . a' * 40} = 1",
        f'x = {{ b = {{ "a"{".a" * 40} = 1 }} }}',
        f"[a{'.a' * 40}]",
        f"[[a{'.a' * 40}]]",
        f"x = 1\n'a'{'.a' * 40} = 1",
        f'"{"a.b" * 40}"{".a" * 40} = 1',
    ],
)
def test_a_deep_key_is_refused_before_it_is_parsed(text: str) -> None:
    with pytest.raises(ValueError, match=r"a key of more than 32 parts is nested too deeply \(at line"):
        parse_toml(text)


@pytest.mark.parametrize(
    "text",
    [
        f"x = '{'a.' * 100}'",
        f'x = "{"a." * 100}" # {"a." * 100}',
        f'x = "\\"{"a." * 100}"',
        f"x = [{'1.5, ' * 100}]",
        f"x = {{ a = '{'.' * 100}', b = 1 }}",
        f'x = """\n{"." * 100}\n{"one of two. " * 100}\n"""',
        f"a{'.a' * 30} = 1",
        f'x = "{"a" * 70}"',
        "x = 9223372036854775807\ny = -9223372036854775808\nz = 0x7fffffffffffffff\nb = true",
    ],
)
def test_what_looks_like_a_deep_key_is_parsed(text: str) -> None:
    assert parse_toml(text)


@pytest.mark.parametrize(
    "number",
    [
        "9223372036854775808",
        "-9223372036854775809",
        "0xffffffffffffffff",
        f"0b{'1' * 64}",
        f"0o{'7' * 22}",
        "1_" * 30 + "1",
    ],
)
@pytest.mark.parametrize("form", ["x = {}", "x = [[{{ y = {} }}]]", "[[a]]\n[a.b]\nx = [1, {}]"])
def test_numbers_beyond_64_bits_are_refused(number: str, form: str) -> None:
    with pytest.raises(ValueError, match="a whole number does not fit into 64 bits"):
        parse_toml(form.format(number))
