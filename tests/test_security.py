"""SECURITY.md is true: nothing of this project opens a connection, and what decides runs no code of a plugin."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import fields_dict

from attnplug.request.settings import PREFIX, Settings
from tests.command import empty, no_plugins  # noqa: F401 - fixtures
from tools.toml import read_toml

if TYPE_CHECKING:
    from tests.command import Site

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text("utf-8")
SOURCES = sorted(
    path for place in ("core", "kit", "hosts/*", "plugins/*") for path in ROOT.glob(f"{place}/src/**/*.py")
)
NETWORK = {
    "socket",
    "socketserver",
    "ssl",
    "urllib",
    "http",
    "ftplib",
    "smtplib",
    "requests",
    "httpx",
    "aiohttp",
    "urllib3",
}


def _imported(tree: ast.AST) -> set[str]:
    """Return the top modules that a file imports anywhere; `urllib.parse` opens nothing."""
    found = set()
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        found |= {name.partition(".")[0] for name in names if name != "urllib.parse"}
    return found


def test_nothing_imports_what_opens_a_connection() -> None:
    assert len(SOURCES) > 200

    assert [path.name for path in SOURCES if _imported(ast.parse(path.read_text("utf-8"))) & NETWORK] == []


@pytest.mark.parametrize("source", ["import socket", "from urllib.request import urlopen", "import http.client as h"])
def test_such_an_import_is_found(source: str) -> None:
    assert _imported(ast.parse(source)) & NETWORK


def test_a_decision_opens_no_connection_and_runs_no_plugin(empty: Site) -> None:  # noqa: F811 - the fixture
    """An audit hook sees every socket and every process, whatever imports them."""
    empty.add("evil", MANIFEST)

    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["evil/default", "eligible"]


MANIFEST = """\
api = "1.0"
backend = { name = "evil", summary = "its module talks" }
[supports]
device_type = "cpu"
dtype = "bfloat16"
head_size = 64
features = ["causal"]
"""
PROGRAM = """\
import sys
def watch(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "urllib.")):
        raise AssertionError(event)
sys.addaudithook(watch)
import attnplug
request = attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16", paged=False)
verdicts = attnplug.explain(request, "cpu").verdicts
found = next((verdict for verdict in verdicts if verdict.id.startswith("evil/")), None)
assert found, verdicts
assert not [name for name in sys.modules if name.startswith("scratch_evil")]
print(found.id, found.status.replace("chosen", "eligible"))
"""


def test_the_dependencies_and_settings_that_it_names_are_those_of_core() -> None:
    project = read_toml(ROOT / "core" / "pyproject.toml")["project"]
    names = {re.match(r"[a-z]+", each)[0] for each in project["dependencies"]}  # type: ignore[index] # each has a name
    listed = re.search(r"dependencies of the core are ([^.]*?) before", TEXT.replace("\n", " "))

    assert listed is not None
    assert set(re.findall(r"[a-z]+", listed[1])) - {"and"} == names
    fields = {f"{PREFIX}{name.upper()}" for name in fields_dict(Settings)}
    assert set(re.findall(r"`(ATTNPLUG_[A-Z]+)`", TEXT)) <= {*fields, f"{PREFIX}CONFIG"}
