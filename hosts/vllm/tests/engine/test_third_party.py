"""A third party's plugin in vLLM: begun by `attnplug new`, edited, installed from its wheel, with no line for vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from zipfile import ZipFile

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-hosts` runs these", allow_module_level=True)

from hosts.vllm.tests.engine import harness, models

pytestmark = pytest.mark.needs_engine

NAME = "ATTNPLUG_ACME_WINDOW_PLAIN"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
# What its author adds to the template: a window, declared and computed.
EDITS = {
    "attnplug.toml": (
        ('summary = "attention in plain torch"', 'summary = "attention in plain torch, with windows"'),
        ('features = ["paged"', 'sliding_window = { min = 1 }\nfeatures = ["paged"'),
    ),
    "backend.py": (
        (
            "scores.masked_fill(distance < 0, -torch.inf)",
            "scores.masked_fill((distance < 0) | (self.window[0] >= 0) & (distance > self.window[0]), -torch.inf)",
        ),
    ),
}
PROMPTS = harness.prompts(5, 40, 1, 77, 110)  # longer than the window, and than a chunk


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Begin a plugin, and edit it."""
    folder = tmp_path_factory.mktemp("acme") / "attnplug-acme-window"
    run(sys.executable, "-m", "attnplug", "new", "acme_window", "--path", str(folder))
    for name, edits in EDITS.items():
        file = folder / "src/attnplug_acme_window" / name
        text = file.read_text("utf-8")
        for old, new in edits:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        file.write_text(text, "utf-8")
    return folder


@pytest.fixture(scope="module")
def site(project, tmp_path_factory):
    """Install its wheel into a folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("installed")
    run(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(project))
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if b"vllm" in archive.read(name).lower()]
    run(*PIP, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel))
    return folder / "site"


def run(*command):
    outside = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
    done = subprocess.run(command, env=outside, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_greedy_tokens_are_those_of_transformers(server, folder, site):
    given = [{"prompts": PROMPTS, "max_tokens": 16}]

    found = server.run(
        folder("mistral"), given, path=[site], attention_backend=NAME, environment={"VLLM_PLUGINS": "attnplug"}
    )

    assert "error" not in found, found["error"]
    assert list(found["layers"].values()) == [[NAME, "acme_window/plain"]] * models.SIZES["num_hidden_layers"]
    assert harness.compare(folder("mistral"), PROMPTS, found["rounds"][0]) == (0, pytest.approx(0, abs=1e-4))


def test_what_it_does_not_declare_is_refused(server, folder, site):
    found = server.run(
        folder("gemma2"), [], path=[site], attention_backend=NAME, environment={"VLLM_PLUGINS": "attnplug"}
    )

    assert "acme_window/plain" in found["error"]
    assert "does not support logits_soft_cap=5.0" in found["error"]
