"""Whole engines of SGLang on the CPU: greedy tokens are those of transformers, with reused prefixes and retraction."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hosts.sglang.tests.engine import models

pytestmark = pytest.mark.slow
RUN = Path(__file__).parent / "run.py"
OPTIONS = {
    "device": "cpu",
    "attention_backend": "attnplug",
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_running_requests": 4,
    "mem_fraction_static": 0.3,
    "random_seed": 1,
    "disable_cuda_graph": True,
    "grammar_backend": "none",
    "log_level": "info",
}


def tokens(count: int, seed: int) -> list[int]:
    """Return a prompt."""
    return [random.Random(seed * 1000 + i).randrange(3, 512) for i in range(count)]


def run(folder: Path, model: Path, rounds: list[dict[str, Any]], **options: Any) -> tuple[list[Any], str]:
    """Return what each round gave, and the log of the engine."""
    job, result, log = folder / "job.json", folder / "result.json", folder / "log"
    job.write_text(json.dumps({"options": {**OPTIONS, "model_path": str(model), **options}, "rounds": rounds}))
    with log.open("w") as written:
        ended = subprocess.run(
            [sys.executable, str(RUN), str(job), str(result)], stdout=written, stderr=written, timeout=400, check=False
        )
    text = log.read_text()
    assert ended.returncode == 0, text[-6000:]
    return json.loads(result.read_text()), text


def check(model: Any, rounds: list[dict[str, Any]], found: list[Any]) -> None:
    """Compare each prompt's tokens with those of transformers."""
    for asked, answers in zip(rounds, found, strict=True):
        for prompt, answer in zip(asked["prompts"], answers, strict=True):
            assert answer["tokens"] == models.generated(model, prompt, asked["max_new_tokens"])


@pytest.mark.parametrize("name", models.NAMES)
def test_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model = models.make(name, tmp_path / "model")
    shared = tokens(40, 1)
    rounds = [
        {"prompts": [shared, tokens(5, 2), tokens(23, 3)], "max_new_tokens": 24},
        {
            "prompts": [shared + tokens(6, 4), shared[:30] + tokens(3, 5), tokens(50, 6), tokens(1, 7)],
            "max_new_tokens": 16,
        },
    ]
    found, log = run(tmp_path, tmp_path / "model", rounds, max_total_tokens=2048, chunked_prefill_size=32)
    assert "attention by attnplug" in log
    assert ("SWAKVPool" in log) == (name == "granite_swa")
    check(model, rounds, found)
    assert found[1][0]["cached"] >= 32, "the prefix of the first round was not found"


@pytest.mark.parametrize(
    ("page", "threshold", "capacity", "forms"),
    [
        (1, 100, 131072, {"MLA", "MHA_ONE_SHOT"}),
        (64, 1, 96, {"MLA", "MHA_ONE_SHOT", "MHA_CHUNKED_KV"}),
    ],
)
def test_latents_absorbed_and_per_head(
    page: int, threshold: int, capacity: int, forms: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # SGLang's kernels that list the slots of prefixes, and that merge
    monkeypatch.setenv("SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD", str(threshold))
    monkeypatch.setenv("SGLANG_MAX_KV_CHUNK_CAPACITY", str(capacity))
    model = models.make(models.LATENT, tmp_path / "model")
    shared = tokens(140, 1)
    rounds = [
        {"prompts": [shared, tokens(5, 2), tokens(23, 3)], "max_new_tokens": 8},
        {"prompts": [shared + tokens(6, 4), shared[:130] + tokens(3, 5), tokens(150, 6)], "max_new_tokens": 6},
    ]
    options = {"page_size": page, "chunked_prefill_size": 64, "enable_mixed_chunk": True, "max_total_tokens": 2048}
    found, log = run(tmp_path, tmp_path / "model", rounds, **options)
    assert "kv_cache_form=latent" in log
    assert set(re.findall(r"the form is (\w+)", log)) == forms
    assert [one["cached"] for one in found[1]] == ([140, 130, 0] if page == 1 else [128, 128, 0])
    check(model, rounds, found)
    prompts = [prompt for asked in rounds for prompt in asked["prompts"]]
    pairs = list(zip(prompts, [one for each in found for one in each], strict=True))
    assert max(float(models.errors(model, *pair).max()) for pair in pairs) < 1e-3
    wrong = models.with_projections_apart(model)
    assert min(float(models.errors(wrong, *pair).max()) for pair in pairs) > 0.1


def test_requests_are_retracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "true")  # as if the pool were full, every few steps
    model = models.make("llama", tmp_path / "model")
    rounds = [{"prompts": [tokens(20, seed) for seed in range(4)], "max_new_tokens": 30}]
    found, log = run(tmp_path, tmp_path / "model", rounds, max_total_tokens=2048, page_size=1)
    assert re.search(r"Testing retraction\. #retracted_reqs: [1-9]", log), log[-4000:]
    check(model, rounds, found)


def test_decodes_read_what_a_backend_of_sglang_wrote(tmp_path: Path) -> None:
    model = models.make("llama", tmp_path / "model")
    rounds = [{"prompts": [tokens(40, 1), tokens(5, 2)], "max_new_tokens": 12}]
    names = {"prefill_attention_backend": "torch_native", "decode_attention_backend": "attnplug:torch/sdpa"}
    found, log = run(tmp_path, tmp_path / "model", rounds, attention_backend=None, max_total_tokens=2048, **names)
    assert "attention by attnplug" in log
    check(model, rounds, found)


def test_a_plugin_that_attnplug_new_began_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps", "--no-index"]
    for command in (
        [sys.executable, "-m", "attnplug", "new", "acme", "--path", str(tmp_path / "project")],
        [*pip, "--no-build-isolation", "--target", str(tmp_path / "site"), str(tmp_path / "project")],
    ):
        subprocess.run(command, check=True, capture_output=True)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    model = models.make("llama", tmp_path / "model")
    rounds = [{"prompts": [tokens(20, 1), tokens(5, 2)], "max_new_tokens": 8}]
    found, log = run(
        tmp_path,
        tmp_path / "model",
        rounds,
        attention_backend="attnplug:acme/plain",
        max_total_tokens=2048,
        page_size=16,
    )
    assert "acme/plain" in log
    check(model, rounds, found)
