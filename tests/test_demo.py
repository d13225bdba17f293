"""``attnplug demo`` agrees with the library, and notices a backend that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnplug.cli.main import main
from attnplug.discovery.plugin import Plugin
from attnplug.discovery.registry import Registry
from attnplug.hosts.transformers.demonstration import EXAMPLES, cut_prompts, demonstrate
from attnplug.manifest.parse import parse_manifest
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import state as process
from core.tests.hosts.mirror import MANIFEST, MirrorImpl

ROOT = Path(__file__).parents[1]
TEXT = """\
An attention backend today is welded into one engine. This project makes it a part that anyone can publish, install,
query, trust and swap: a small core that negotiates, and one distribution per backend. Nothing that was asked for is
silently dropped: it is used, or refused with a reason.
"""


@pytest.fixture
def text(tmp_path):
    """Return a file to continue, and keep the texts of other tests apart."""
    file = tmp_path / "text.md"
    file.write_text(TEXT)
    return file


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """Leave the settings of this machine out, and put the process back as it was."""
    for name in [name for name in os.environ if name.startswith("ATTNPLUG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the models are tiny
    before, process._state = process._state, None
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    process._state = before


@pytest.fixture
def forgetful(monkeypatch):
    """Put a backend in place of all others that loses what it is told to."""
    parsed = parse_manifest(MANIFEST, "mirror/attnplug.toml")
    registry = Registry([Plugin("mirror", "core.tests.hosts.mirror", "mirror", "1.0", parsed)])
    process._state = process.State(registry, Settings(), registry.generation, device=Device.cpu())
    return lambda lost: monkeypatch.setattr(MirrorImpl, "forgets", lost)


def command(*words, cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "attnplug.cli", "demo", *words], capture_output=True, text=True, check=False, cwd=cwd
    )


def test_every_architecture_agrees_token_for_token():
    done = command()

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"{len(EXAMPLES)} of {len(EXAMPLES)} architectures agree, 480 of 480 tokens" in done.stdout
    for example in EXAMPLES:
        assert f"{example.name}: {example.about}" in done.stdout
    assert "model.layers.{0..3}.self_attn (4 layers) -> torch/" in done.stdout
    assert "sliding_window=16, logits_soft_cap=5.0" in done.stdout


def test_json(text, capsys):
    assert main(["demo", "--json", "--text", str(text)]) == 0

    models = json.loads(capsys.readouterr().out)["models"]
    assert [found["name"] for found in models] == [example.name for example in EXAMPLES]
    assert all(found["agrees"] and found["num_equal"] == found["num_tokens"] == 96 for found in models)
    assert all(found["margin"] >= 1e-3 for found in models)  # no choice was left to rounding
    assert all(len({token for row in found["tokens"] for token in row}) > 8 for found in models)
    layer = models[3]["layers"]["model.layers.0.self_attn"]["agreement"]["requirements"]
    assert (layer["sinks"], layer["sliding_window"]) == (True, 16)


@pytest.mark.parametrize(
    ("name", "lost"),
    [("Mistral", "window"), ("Gemma 2", "window"), ("Gemma 2", "logits_soft_cap"), ("gpt-oss", "sinks")],
)
def test_a_backend_that_loses_something_is_noticed(name, lost, forgetful):
    example = next(example for example in EXAMPLES if example.name == name)
    forgetful("")
    assert demonstrate(example, cut_prompts(TEXT.encode()), 16).agrees

    forgetful(lost)
    outcome = demonstrate(example, cut_prompts(TEXT.encode()), 16)

    assert not outcome.agrees
    assert outcome.num_equal < outcome.expected.numel() / 2


def test_a_wrong_backend_is_reported(text, forgetful, capsys):
    forgetful("sinks")

    assert main(["demo", "--text", str(text)]) == 1

    shown = capsys.readouterr().out
    assert "WRONG: " in shown
    assert "4 of 5 architectures agree" in shown


def test_a_named_backend_is_used(text, capsys):
    assert main(["demo", "--json", "--text", str(text), "--backend", "torch/sdpa"]) == 0

    layer = json.loads(capsys.readouterr().out)["models"][0]["layers"]["model.layers.0.self_attn"]
    assert layer["provenance"]["backend"] == "using"


def test_a_backend_that_is_not_here(text, capsys):
    assert main(["demo", "--text", str(text), "--backend", "flash_attn"]) == 1

    assert "flash_attn" in capsys.readouterr().err


def test_without_transformers_the_extra_is_named(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, "-m", "attnplug.cli", "demo"], capture_output=True, text=True, check=False, env=environment
    )

    assert done.returncode == 1
    assert "pip install 'attnplug[transformers]'" in done.stderr


@pytest.mark.parametrize(("name", "said"), [("missing.md", "does not open"), ("short.md", "has 3 bytes")])
def test_a_text_that_will_not_do(tmp_path, name, said, capsys):
    (tmp_path / "short.md").write_text("abc")

    assert main(["demo", "--text", str(tmp_path / name)]) == 2

    assert said in capsys.readouterr().err


def test_without_a_readme_the_package_describes_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert main(["demo", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["text"] == "attnplug's own description"
