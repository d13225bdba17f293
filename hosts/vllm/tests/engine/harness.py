"""Whole engines of vLLM in processes of their own, and what transformers says about the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from hosts.vllm.tests.engine.models import VOCABULARY, load

RUN = Path(__file__).with_name("run.py")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # each engine would take the same cores
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in one process its layers can be inspected
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ENGINE = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,  # shorter than the longest prompts: these are prefilled in chunks
    "enforce_eager": True,
    "block_size": 32,
}


class EngineServer:
    """The process that runs engines, one at a time."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, str(RUN)],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def run(self, model, rounds, *, pooling=False, environment=None, path=(), plugin=None, **engine):
        """
        Run rounds of prompts through one engine; a round has `prompts`, and `max_tokens` if tokens are generated.

        Args:
            model: Its folder.
            rounds: What to run.
            pooling: Whether the model embeds.
            environment: Variables of the engine's processes.
            path: Folders of PYTHONPATH, before all others.
            plugin: One of the workspace whose Triton kernels run on the CPU, where the process interprets them.
            engine: Further arguments of the engine.

        Returns:
            Of each round a list of outputs; the metrics, layers, model runner, mode of compilation and log of the
            engine. Or "error" and the log.
        """
        given = {
            "engine": {"model": str(model)} | ENGINE | engine,
            "rounds": rounds,
            "pooling": pooling,
            "environment": environment or {},
            "path": [str(each) for each in path],
            "plugin": plugin,
        }
        return self._send(given)

    def parse(self, arguments, *names):
        """
        Let vLLM parse arguments of `vllm serve`, beginning with the model.

        Returns:
            The values of these names as "parsed"; or "error" and the log.
        """
        return self._send({"arguments": arguments, "names": names, "environment": {}, "path": []})

    def _send(self, given):
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self):
        """End the process."""
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def prompts(*lengths, seed=5):
    """Return random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def compare(folder, given, outputs):
    """
    Compare greedy tokens with transformers, each after vLLM's own tokens before it.

    Returns:
        How many tokens differ, and the largest difference of a logprob.
    """
    model = load(folder)
    differing, worst = 0, 0.0
    for prompt, output in zip(given, outputs, strict=True):
        tokens = torch.tensor(output["tokens"])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output["tokens"]])).logits[0]
        expected = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
        differing += int((expected.argmax(-1) != tokens).sum())
        chosen = expected.gather(-1, tokens[:, None])[:, 0]
        worst = max(worst, float((chosen - torch.tensor(output["logprobs"])).abs().max()))
    return differing, worst
