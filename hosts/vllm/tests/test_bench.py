"""The calls that ``attnplug bench --host vllm`` measures, beside vLLM's own backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

pytestmark = pytest.mark.needs_engine

# It changes the environment, and starts two engines.
PROGRAM = """
from attnplug_vllm import bench

bench.LAYERS, bench.LENGTH, bench.MAX_LEN = 1, 32, 48
for name, calls in bench.parts("cpu", "torch/sdpa"):
    print("part:", name, "|", *calls, flush=True)
    for call, prepare in calls.values():
        for _ in range(50 if "engine" in name else 2):  # requests end and begin anew
            call(prepare())
"""


def test_the_parts_of_a_step_run_on_both():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
    )

    assert done.returncode == 0, done.stderr[-4000:]
    found = [line.partition(" | ") for line in done.stdout.splitlines() if line.startswith("part:")]
    assert [name for name, _, _ in found] == [
        "part: build, 8 decodes at 32 tokens",
        "part: forward of a layer, 8 decodes at 32 tokens",
        "part: build, a prefill and 7 decodes at 32 tokens",
        "part: forward of a layer, a prefill and 7 decodes at 32 tokens",
        "part: a step of the engine, 8 decodes, 1 layers",
    ]
    assert {calls for _, _, calls in found} == {"CPU_ATTN attnplug on torch/sdpa"}
