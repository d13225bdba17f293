"""Backends of tests: manifests alone, since the decision imports nothing. Their modules do not exist."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import attnplug
from attnplug.selection.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ACME = """
api = "1.0"
backend = { name = "acme", summary = "A backend of a test" }

[supports]
device_type = "cuda"
dtype = ["bfloat16", "float16"]
head_size = { multiple_of = 8, max = 256 }
block_size = [16, { multiple_of = 16 }]
kv_layout = ["NHD", "HND"]
kv_cache_form = ["joint", "interleaved"]
features = ["paged"]

# One generation of hardware, and every feature that vLLM's selector requests.
[variants.hopper]
summary = "All features, on Hopper"
[variants.hopper.supports]
compute_capability = "9.0"
block_size = { min = 32, max = 128, multiple_of = 32 }
kv_cache_form = "packed"
kv_cache_dtype = ["auto", "fp8_e4m3"]
sliding_window = { max = 4096 }
alibi = "sqrt"
cudagraph = { max = "single_token_decode" }
features = [
    "sinks", "logits_soft_cap", "per_head_scales", "causal", "batch_invariant", "dcp_size", "decode_query_len",
    "seq_lens_cpu_kind",
]

[[variants.hopper.rules]]
when = { sinks = true, kv_cache_dtype = "fp8_e4m3" }
because = "the kernels with sinks read 16-bit keys"

[[variants.hopper.rules]]
when = { logits_soft_cap = true }
need = { gqa_ratio = { max = 4 } }
because = "the kernels with a soft cap serve up to four query heads"

# Any GPU, and no feature.
[variants.plain]
summary = "No features"
[variants.plain.supports]
compute_capability = { min = "8.0" }

[variants.library]
summary = "A kernel library that no index has"
requires = ["acme-kernels-of-no-index >=1"]
[variants.library.supports]
compute_capability = { min = "8.0" }

[variants.host]
summary = "The CPU"
[variants.host.supports]
device_type = "cpu"
dtype = ["float32", "bfloat16"]
kv_cache_form = ["packed", "joint"]
"""

CONTESTED = """
api = "1.0"
backend = { name = "acme_host", summary = "A backend whose variant has the name of a variant of another in capitals" }
[supports]
device_type = "cpu"
dtype = "float32"
head_size = 64
features = ["paged"]
block_size = 16
kv_layout = "NHD"
kv_cache_form = "joint"
[variants.fast]
summary = "acme_host/fast"
"""


def offer(folder: Path, manifest: str = ACME) -> str:
    """Offer a backend to this process."""
    name = manifest.partition('name = "')[2].partition('"')[0]
    path = folder / f"{name}.toml"
    path.write_text(manifest)
    return attnplug.register(f"no_such_module_of_{name}", manifest=path)


@contextmanager
def fresh_process() -> Iterator[None]:
    """Let attnplug begin anew in the ``with`` block, and restore it: what was offered by hand outlives a refresh."""
    before, PROCESS.state = PROCESS.state, None
    try:
        yield
    finally:
        PROCESS.state = before
