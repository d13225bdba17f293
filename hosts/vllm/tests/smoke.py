"""
The smoke test of `make release-check`.

Without vLLM it is found as a plugin of vLLM and as an engine, and says that vLLM is missing.
"""

from __future__ import annotations

from importlib.metadata import distribution
from importlib.util import find_spec


def smoke(need, command):
    need(find_spec("vllm") is None, "vLLM is installed, and the host is to be tested without it")
    groups = {entry.group for entry in distribution("attnplug-vllm").entry_points}
    need({"vllm.general_plugins", "attnplug.engines"} <= groups, f"its entry points are {groups}")
    shape = ("--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "8", "--dtype", "bfloat16")
    command("explain", *shape, "--engine", "vllm", codes=(0, 1, 2))
