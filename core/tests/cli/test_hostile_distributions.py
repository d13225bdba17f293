"""One hostile distribution beside a good one: every command serves the good one, and names what is wrong."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug.discovery.distribution import Entry
from attnplug.discovery.plugin import read_plugin
from attnplug.discovery.scan import scan
from attnplug.request import files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.command import Outcome, Site

pytestmark = pytest.mark.unmeasured

GOOD = """\
api = "1.0"
backend = { name = "good", summary = "serves everything" }
[supports]
device_type = "cpu"
dtype = ["float32", "bfloat16"]
head_size = { min = 1 }
block_size = { min = 1 }
features = ["paged"]
"""
EVIL = GOOD.replace('"good"', '"spoiled"')
POINTS = "[attnplug.backends]\nspoiled = scratch_evil.plugin\n"
FLAGS = ("--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "8", "--dtype", "bfloat16", "--device", "cpu")
DIGITS = "9" * 5000
UNDEFINED = "library; os_name ~= 'linux'"
RULE = '[[rules]]\nwhen = {{ installed = "{}" }}\nbecause = "why"\n'


class Evil:
    """A distribution to spoil: its files, which `make` writes as they are now."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "scratch_evil"
        self.info = folder / "attnplug_evil-1.0.dist-info"
        for each in (self.package, self.info):
            each.mkdir()
        (self.package / "__init__.py").touch()
        self.manifest = self.package / "attnplug.toml"
        self.points = self.info / "entry_points.txt"
        self.metadata = self.info / "METADATA"
        self.evidence = self.package / "evidence" / "run.json"
        self.evidence.parent.mkdir()
        self.manifest.write_text(EVIL)
        self.points.write_text(POINTS)
        self.metadata.write_text("Metadata-Version: 2.1\nName: attnplug-evil\nVersion: 1.0\n")
        self.evidence.write_text("{}")


def says(text: str) -> Callable[[Evil], None]:
    """Return what makes this the manifest."""
    return lambda evil: evil.manifest.write_text(text)


def points(text: str) -> Callable[[Evil], None]:
    return lambda evil: evil.points.write_text(text)


def replaced(file: str, make: Callable[[Path], Any]) -> Callable[[Evil], None]:
    """Return what puts something else in place of a file."""

    def spoil(evil: Evil) -> None:
        path = getattr(evil, file)
        path.unlink()
        make(path)

    return spoil


def sparse(path: Path) -> None:
    """Make a file of 50 MB that takes no space."""
    with path.open("wb") as file:
        file.truncate(50 * 2**20)


def to(target: str) -> Callable[[Path], None]:
    return lambda path: path.symlink_to(target)


# What spoils the distribution, and what a reason says of it: each of these plugins is broken.
BROKEN: dict[str, tuple[Callable[[Evil], None], str]] = {
    "long module": (points(f"[attnplug.backends]\nspoiled = scratch_evil.{'a' * 300}\n"), "a name has at most 255"),
    "long package": (points(f"[attnplug.backends]\nspoiled = {'a' * 300}.plugin\n"), "a name has at most 255"),
    "many parts": (points(f"[attnplug.backends]\nspoiled = scratch_evil{'.a' * 5000}\n"), "a name has at most 255"),
    "digits in api": (says(EVIL.replace("1.0", f"{DIGITS}.0")), "api is the contract version"),
    "digits in minor api": (says(EVIL.replace("1.0", f"1.{DIGITS}")), "api is the contract version"),
    "digits in requires": (says(f'{EVIL}[variants.one]\nrequires = ["library >={DIGITS}"]\n'), "at most 1,000"),
    "digits in a rule": (says(EVIL + RULE.format(f"library >={DIGITS}")), "at most 1,000"),
    "large soft cap": (says(f"{EVIL}logits_soft_cap = {'9' * 400}\n"), "64 bits"),
    "large soft cap in a range": (says(f"{EVIL}logits_soft_cap = {{ max = {'9' * 400} }}\n"), "64 bits"),
    "large hexadecimal": (says(f"{EVIL}head_size_v = 0x{'f' * 5000}\n"), "64 bits"),
    "large number with underscores": (says(f"{EVIL}head_size_v = 0b{'1_' * 100}1\n"), "64 bits"),
    "undefined marker": (says(f'{EVIL}[variants.one]\nrequires = ["{UNDEFINED}"]\n'), "PEP 508"),
    "undefined marker in a rule": (says(EVIL + RULE.format(UNDEFINED)), "PEP 508"),
    "nested marker": (says(EVIL + RULE.format(f"library; {'(' * 490}'a'=='b'{')' * 490}")), "nested too deeply"),
    "blanks": (says(f"{EVIL}odd = [\n[{' ' * 20_000}\n]]\n"), "the field 'odd'"),
    "blanks and brackets": (says(f'{EVIL}[options.a]\n"{"[ " * 2000}" = 1\n'), "the key"),
    "deep key": (says(f"{EVIL}a{'.a' * 20_000} = 1\n"), "nested too deeply"),
    "deep key in an inline table": (says(f"{EVIL}x = {{ a{'.a' * 20_000} = 1 }}\n"), "nested too deeply"),
    "deep table": (says(f"{EVIL}[a{'.a' * 20_000}]\n"), "nested too deeply"),
    "deep array of tables": (says(f"{EVIL}[[a{'.a' * 20_000}]]\n"), "nested too deeply"),
    "deep array": (says(f"{EVIL}x = {'[' * 20_000}\n"), "nested too deeply"),
    "deep table of tables": (says(f"{EVIL}x = {'{a=' * 10_000}\n"), "nested too deeply"),
    "deep value": (says(f"summary = {'[' * 80}1{']' * 80}\n{EVIL}"), "the key 'summary'"),
    "no UTF-8": (lambda evil: evil.manifest.write_bytes(b"\xff\xfe"), "UTF-8"),
    "many variants": (says(EVIL + "".join(f"[variants.v{i}]\n" for i in range(2000))), "at most 100 variants"),
    "manifest is a FIFO": (replaced("manifest", os.mkfifo), "no regular file"),
    "manifest is a device": (replaced("manifest", to("/dev/zero")), "no regular file"),
    "manifest is a folder": (replaced("manifest", os.mkdir), "Is a directory"),
    "manifest is a loop": (replaced("manifest", to("attnplug.toml")), "symbolic links"),
    "manifest of 50 MB": (replaced("manifest", sparse), "larger than 64 KiB"),
    "METADATA is a FIFO": (replaced("metadata", os.mkfifo), "METADATA"),
    "METADATA is a device": (replaced("metadata", to("/dev/zero")), "METADATA"),
    "METADATA of 50 MB": (replaced("metadata", sparse), "larger than 4 MiB"),
    "long version": (lambda evil: evil.metadata.write_text(f"Name: attnplug-evil\nVersion: {DIGITS}\n"), "version"),
    "long name": (lambda evil: evil.metadata.write_text(f"Name: evil{'l' * 5000}\nVersion: 1.0\n"), "name"),
    "5,000 backends": (
        points("[attnplug.backends]\nspoiled = a\n" + "".join(f"b{i} = m{i}.plugin\n" for i in range(5000))),
        "offers 5,001",
    ),
}
# What is no plugin, or stays one: these are skipped with a note, or harm nothing.
HARMLESS: dict[str, tuple[Callable[[Evil], None], str]] = {
    "entry points are a FIFO": (replaced("points", os.mkfifo), "no regular file"),
    "entry points are a device": (replaced("points", to("/dev/zero")), "no regular file"),
    "entry points of 50 MB": (replaced("points", sparse), "larger than 256 KiB"),
    "20,000 backends": (
        points("[attnplug.backends]\n" + "".join(f"b{i} = m{i}.plugin\n" for i in range(20_000))),
        "larger than 256 KiB",
    ),
    "5,000 scripts": (points("[console_scripts]\n" + "".join(f"s{i} = m{i}:f\n" for i in range(5000))), ""),
    "20,000 scripts": (
        points("[console_scripts]\n" + "".join(f"s{i} = m{i}:f\n" for i in range(20_000))),
        "larger than",
    ),
    "20,000 odd lines": (points("[console_scripts]\n" + "".join(f"s{i}\n" for i in range(20_000))), "20,000 lines"),
    "one long line": (points("x" * 200_000), "which is no `name = value`"),
    "evidence is a FIFO": (replaced("evidence", os.mkfifo), "no regular file"),
    "evidence is a device": (replaced("evidence", to("/dev/zero")), "no regular file"),
    "evidence of 50 MB": (replaced("evidence", sparse), "larger than 4 MiB"),
    "deep evidence": (lambda evil: evil.evidence.write_text("[" * 100_000), "nested too deeply"),
}


def select() -> str:
    attnplug.refresh()
    requirements = attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16")
    return attnplug.select(requirements, "cpu").id


@pytest.fixture
def evil(empty: Site) -> Evil:
    empty.add("good", GOOD)
    return Evil(empty.folder)


def check_good(run: Callable[..., Outcome]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Check that every command serves the good one; return the backends by name, and what doctor notes."""
    listed = run("list", "--json")
    doctor = run("doctor", "--json").json
    backends = {backend["name"]: backend for backend in listed.json["backends"]}

    assert listed.code == 0
    assert run("list").code == run("explain", *FLAGS).code == 0
    assert backends["good"]["variants"][0]["availability"] == "ready"
    assert run("explain", *FLAGS, "--json").json["explanations"][0]["chosen"] == "good/default"
    assert {b["name"]: b["variants"][0]["availability"] for b in doctor["backends"]}["good"] == "ready"
    assert select() == "good/default"
    return backends, doctor["notes"]


@pytest.mark.parametrize(("spoil", "why"), BROKEN.values(), ids=BROKEN)
def test_a_hostile_plugin_is_broken_and_harms_no_other(evil: Evil, run: Any, spoil: Any, why: str) -> None:
    spoil(evil)

    (variant,) = check_good(run)[0]["spoiled"]["variants"]

    assert variant["availability"] == "broken"
    assert why in variant["reasons"][0]["supported"] + variant["reasons"][0]["because"]
    assert variant["action"]
    assert len(str(variant)) < 3000
    assert "  fix: " in run("doctor").out


@pytest.mark.parametrize(("spoil", "note"), HARMLESS.values(), ids=HARMLESS)
def test_what_is_odd_is_noted_and_harms_no_other(evil: Evil, run: Any, spoil: Any, note: str) -> None:
    spoil(evil)

    _, notes = check_good(run)

    assert not note or note in " ".join(each["message"] for each in notes)
    assert len(str(notes)) < 4000


@pytest.mark.parametrize("version", [DIGITS, "1" * 300 + "!", "x" * 5000, "1.0; rm", "1.0.0.0rc" + DIGITS])
def test_a_neighbour_of_an_odd_version_harms_no_plugin(empty: Site, run: Any, version: str) -> None:
    empty.add("good", GOOD + '[variants.default]\n[variants.more]\nrequires = ["odd >=1.5"]\n')
    info = empty.folder / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: odd\nVersion: {version}\n")

    backends, _ = check_good(run)

    more = backends["good"]["variants"][1]
    assert more["availability"] in ("missing_dependency", "ready")
    assert len(more["reasons"][0]["supported"] if more["reasons"] else "") < 400


def unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operating system refuse everything in a folder, as it refuses users other than root."""

    def refusing(name: str) -> None:
        real = getattr(os, name)

        def call(path: Any, *arguments: Any, **keywords: Any) -> Any:
            if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(f"{folder}{os.sep}"):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return real(path, *arguments, **keywords)

        monkeypatch.setattr(os, name, call)

    for name in ("stat", "lstat", "open", "listdir", "scandir"):
        refusing(name)
    folder.chmod(0)


def test_an_unreadable_plugin_folder_is_broken(evil: Evil, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable(evil.package, monkeypatch)

    (variant,) = check_good(run)[0]["spoiled"]["variants"]

    assert variant["availability"] == "broken"
    assert "Permission denied" in variant["reasons"][0]["because"]


def test_an_unreadable_metadata_folder_is_noted(evil: Evil, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unreadable(evil.info, monkeypatch)

    backends, notes = check_good(run)

    assert "spoiled" not in backends
    assert "PermissionError" in " ".join(each["message"] for each in notes)


@pytest.mark.parametrize(
    "spoil", [spoil for spoil, _ in (*BROKEN.values(), *HARMLESS.values())], ids=[*BROKEN, *HARMLESS]
)
def test_the_bytes_that_are_read_are_bounded(evil: Evil, monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    spoil(evil)
    sizes: list[int] = []
    real = os.read

    def read(descriptor: int, count: int) -> bytes:
        content = real(descriptor, count)
        sizes.append(len(content))
        return content

    monkeypatch.setattr(files.os, "read", read)
    found = scan([str(evil.info.parent)])
    for entry in found.entries:
        read_plugin(entry)
    assert sum(sizes) <= 6 * 2**20


def test_the_plugins_of_one_distribution_are_bounded(evil: Evil) -> None:
    BROKEN["5,000 backends"][0](evil)

    found = scan([str(evil.info.parent)])

    assert 1 <= len([entry for entry in found.entries if entry.distribution == "attnplug-evil"]) <= 100
    assert Entry("good", "scratch_good_good.plugin", "attnplug-good", "1.0") in found.entries


def test_the_name_of_the_built_in_backend_stays_its_own(empty: Site, run: Any) -> None:
    empty.add("good", GOOD)
    manifest = GOOD.replace('"good"', '"torch", aliases = ["TORCH_SDPA", "good"]').replace(
        "head_size = {", "head_size = { max = 8,"
    )
    empty.add("torch", manifest, distribution="attnplug-rival")

    listed = run("list", "--json").json["backends"]
    built_in, rival = sorted((b for b in listed if b["name"] == "torch"), key=lambda b: not b["built_in"])

    assert built_in["variants"][0]["availability"] == "ready"
    assert built_in["aliases"] == ["TORCH_SDPA"]
    assert [variant["availability"] for variant in rival["variants"]] == ["broken"]
    assert "'torch' is offered by attnplug " in str(rival["variants"][0]["reasons"])
    assert "attnplug-rival 1.0" in str(rival["variants"][0]["reasons"])
    assert "torch: the backend 'torch' is offered by" in run("doctor").out.replace("\n", " ").replace("      ", " ")
    for name in ("torch", "TORCH_SDPA", "torch/sdpa"):
        assert (
            run("explain", *FLAGS, "--backend", name, "--json").json["explanations"][0]["chosen"].startswith("torch/")
        )
    requirements = attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16")
    attnplug.refresh()
    assert attnplug.select(requirements, "cpu", backend="torch").id == "torch/sdpa"
    assert attnplug.select(requirements, "cpu").id == "good/default"
    assert attnplug.load(requirements, "cpu", backend="torch/sdpa").id == "torch/sdpa"
