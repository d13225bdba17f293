"""A whole engine in processes that vLLM spawns: the name travels in its configuration, and errors reach the log."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

RUN = """
import sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=sys.argv[1], attention_backend=sys.argv[2], load_format="dummy", dtype="float32",
        skip_tokenizer_init=True, max_model_len=128, max_num_seqs=2, enforce_eager=True,
        tensor_parallel_size=int(sys.argv[3]),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    (found,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], sampling, use_tqdm=False)
    print("tokens:", len(found.outputs[0].token_ids))
"""
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


pytestmark = [pytest.mark.slow, pytest.mark.needs_engine]


def start(folder: Path, backend: str, ranks: int = 1, **settings: str) -> subprocess.CompletedProcess[str]:
    """Run a tiny model in an engine core and a worker, each a process that vLLM spawns."""
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "run.py").write_text(RUN)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "HF_HUB_OFFLINE": "1",
        **settings,
    }
    command = [sys.executable, str(folder / "run.py"), str(folder), backend, str(ranks)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_named_backend_runs_in_a_spawned_worker(tmp_path: Path) -> None:
    done = start(tmp_path, "ATTNPLUG_TORCH_SDPA")
    assert "tokens: 4" in done.stdout, done.stderr
    (line,) = {line for line in (done.stdout + done.stderr).splitlines() if "in the place of vLLM's own CPU" in line}
    assert "Worker" in line
    assert "attnplug runs ATTNPLUG_TORCH_SDPA" in line


def test_each_rank_runs_the_backend_that_was_named(tmp_path: Path) -> None:
    done = start(tmp_path, "ATTNPLUG", 2, ATTNPLUG_BACKEND="torch/sdpa", VLLM_CPU_OMP_THREADS_BIND="nobind")
    said = done.stdout + done.stderr
    assert "tokens: 4" in done.stdout, said
    assert all(re.search(rf"{rank}.*attnplug runs ATTNPLUG", said) for rank in ("Worker_TP0", "Worker_TP1")), said


def test_a_refusal_stops_the_engine_with_its_reasons(tmp_path: Path) -> None:
    done = start(tmp_path, "ATTNPLUG", ATTNPLUG_BACKEND="torch/flex")
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert "torch/flex: requires device type cuda; the device is cpu" in said
    assert "fix: pass --attention-backend ATTNPLUG_TORCH_SDPA" in said


def test_naming_what_cannot_run_stops_before_any_process(tmp_path: Path) -> None:
    done = start(tmp_path, "ATTNPLUG_TORCH_FLEX")
    assert done.returncode != 0
    assert "'torch/flex' cannot run here: requires device type cuda; the device is cpu" in done.stderr
    assert "Worker" not in done.stdout + done.stderr
