"""The calls that ``attnplug bench --host sglang`` measures, beside SGLang's own backend."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("sglang") is None, reason="SGLang is not installed here; `make test-hosts` runs these"
    ),
]

# SGLang publishes its options once in a process.
PROGRAM = """
from hosts.sglang.tests import stand_ins
stand_ins.install_for_engines()
from attnplug_sglang import bench

for name, calls in bench.parts("cpu", "torch/sdpa"):
    print("part:", name, "|", *calls, flush=True)
    for call, prepare in calls.values():
        call(prepare())
"""


def test_the_parts_of_a_step_run_on_both():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("part:")] == [
        "part: metadata of an eager step, 8 decodes at 128 tokens | torch_native attnplug:torch/sdpa",
        "part: layers of an eager step, 8 decodes at 128 tokens, 4 layers | torch_native attnplug:torch/sdpa",
    ]
