"""
The smoke test of `make release-check`.

Without SGLang it is found as a plugin of SGLang, and every candidate has a name.
"""

from __future__ import annotations

from importlib.metadata import distribution
from importlib.util import find_spec

from attnplug_sglang.registration import names


def smoke(need, _command):
    need(find_spec("sglang") is None, "SGLang is installed, and the host is to be tested without it")
    groups = {entry.group for entry in distribution("attnplug-sglang").entry_points}
    need("sglang.srt.plugins" in groups, f"its entry points are {groups}")
    need({"attnplug", "attnplug:torch/sdpa"} <= set(names()), f"its names are {sorted(names())}")
