"""Where a configuration is looked for: a file, a folder, a model id in the local Hugging Face cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from attnplug.errors import RequirementsError
from attnplug.models import requirements_from_json
from attnplug.models.locate import find_config, hub_cache

if TYPE_CHECKING:
    from pathlib import Path

VARIABLES = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "fedcba9876543210fedcba9876543210fedcba98"
LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 8, "dtype": "float32"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home folder without anything, and no variable that names another cache."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def store(cache: Path, model: str, commit: str = COMMIT, ref: str | None = "main") -> Path:
    """Write a model's configuration as the library's cache has it, and return the snapshot."""
    folder = cache / f"models--{model.replace('/', '--')}"
    blob = folder / "blobs" / "1f2e"
    snapshot = folder / "snapshots" / commit
    for each in (blob.parent, snapshot, folder / "refs"):
        each.mkdir(parents=True, exist_ok=True)
    blob.write_text(json.dumps(LLAMA))
    (snapshot / "config.json").symlink_to(blob)
    if ref is not None:
        (folder / "refs" / ref).write_text(commit)
    return snapshot


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ".cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "xdg"}, "xdg/huggingface/hub"),
        ({"HF_HOME": "hf", "XDG_CACHE_HOME": "xdg"}, "hf/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "old", "HF_HOME": "hf"}, "old"),
        ({"HF_HUB_CACHE": "hub", "HUGGINGFACE_HUB_CACHE": "old", "HF_HOME": "hf"}, "hub"),
        ({"HF_HUB_CACHE": "~/tilde", "HF_HOME": ""}, "tilde"),
        ({"HF_HOME": ""}, ".cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_its_library_has_it(home: Path, monkeypatch, variables, expected: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(home / value) if value and "~" not in value else value)

    assert hub_cache() == home / expected


def test_the_cache_is_that_of_huggingface_hub(home: Path, start_python) -> None:
    code = "from huggingface_hub.constants import HF_HUB_CACHE; print(HF_HUB_CACHE)"

    assert start_python(code, HF_HOME=str(home / "hf")) == str(home / "hf" / "hub")


@pytest.fixture
def start_python(monkeypatch):
    """Return what runs code in a new process with variables, and returns what it prints."""
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")

    def run(code: str, **variables: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()

    return run


def test_a_model_id_is_its_snapshot_of_main(home: Path) -> None:
    snapshot = store(home / ".cache/huggingface/hub", "owner/model")

    assert find_config("owner/model") == snapshot / "config.json"
    assert list(requirements_from_json("owner/model")) == ["layers.0.self_attn"]


def test_other_revisions_are_named(home: Path) -> None:
    cache = home / ".cache/huggingface/hub"
    first = store(cache, "gpt2")
    second = store(cache, "gpt2", OTHER, "v2")

    assert find_config("gpt2@v2") == find_config(f"gpt2@{OTHER}") == second / "config.json"
    assert find_config("gpt2@main") == find_config("gpt2") == first / "config.json"


def test_files_and_folders_come_first(home: Path) -> None:
    store(home / ".cache/huggingface/hub", "owner/model")
    (home / "owner/model").mkdir(parents=True)
    (home / "owner/model/config.json").write_text("{}")

    assert find_config("owner/model").resolve() == home / "owner/model/config.json"
    assert find_config("owner/model/config.json").name == "config.json"


def test_an_error_says_where_it_looked(home: Path) -> None:
    with pytest.raises(RequirementsError) as caught:
        find_config("owner/model")

    text = str(caught.value)
    assert "'owner/model' was given as the configuration, and is not found" in text
    assert str(home / ".cache/huggingface/hub/models--owner--model") in text
    assert "hf download owner/model config.json" in text


def test_a_model_without_main_names_its_revisions(home: Path) -> None:
    store(home / ".cache/huggingface/hub", "owner/model", ref=None)

    with pytest.raises(
        RequirementsError, match=f"revisions with a config.json are {COMMIT}(?s:.)*owner/model@{COMMIT}"
    ):
        find_config("owner/model")


def test_a_snapshot_without_a_configuration_is_an_error(home: Path) -> None:
    (store(home / ".cache/huggingface/hub", "owner/model") / "config.json").unlink()

    with pytest.raises(RequirementsError, match=f"{COMMIT}/config.json(?s:.)*hf download"):
        find_config("owner/model")


def test_a_revision_leaves_no_folder_of_the_cache(home: Path) -> None:
    store(home / ".cache/huggingface/hub", "owner/model")
    (home / "secret").write_text(COMMIT)

    for revision in ("../../../../../secret", "/etc/hostname"):
        with pytest.raises(RequirementsError, match="is not found"):
            find_config(f"owner/model@{revision}")


@pytest.mark.parametrize(
    ("name", "hint"), [("params.json", "the publisher's own format"), ("model_index.json", "a pipeline of diffusers")]
)
def test_a_folder_of_another_format_is_named(home: Path, name: str, hint: str) -> None:
    (home / name).write_text("{}")

    with pytest.raises(RequirementsError, match=hint):
        find_config(str(home))


@pytest.mark.parametrize("name", ["", "nothing.json", "a/b/c", "a b", "\0", "x" * 300])
def test_other_names_are_paths(home: Path, name: str) -> None:
    with pytest.raises(RequirementsError):
        requirements_from_json(name)
