"""
Plugins to measure with: real distributions in a folder, with metadata, entry points and manifests, and no code at all.

Their manifests are as long as those of real kernel libraries: alternatives, rules, preferences, options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_HEAD: Final = """\
api = "1.0"
backend = {{ name = "bench_{i}", aliases = ["BENCH_{i}"], summary = "Kernels of the {i}th vendor, paged and dense" }}

[supports]
device_type = ["cpu", "cuda"]
dtype = ["bfloat16", "float16"]
kv_layout = ["NHD", "HND"]
attn_type = ["decoder", "encoder_only"]
features = ["paged", "sliding_window", "logits_soft_cap", "return_lse", "cascade", "kv_sharing", "decode_query_len"]

[[rules]]
when = {{ cascade = true }}
need = {{ sliding_window = false, alibi = false, dcp_size = false }}
because = "the shared prefix is one dense pass over every cached key"

[[prefer]]
order = ["v{last}"]
when = {{ compute_capability = "9.0" }}
because = "decode of 64 requests"

[options.tensor_core_ratio]
type = "int"
min = 1
default = 4
help = "query heads per KV head from which tensor cores are used"
"""

_VARIANT: Final = """
[variants.v{j}]
summary = "the {j}th build"
requires = ["attnplug >=0.1,<99"{lacking}]

[variants.v{j}.supports]
compute_capability = ["9.0", {{ min = "10.0", max = "11.0" }}]
head_size = {{ multiple_of = {step}, max = {most} }}
block_size = [{block}, {{ multiple_of = 16 }}]
cudagraph = {{ max = "uniform_batch" }}
kv_cache_dtype = ["bfloat16", "float16", "fp8_e4m3"]
features = [{features}]

[[variants.v{j}.rules]]
when = {{ kv_cache_dtype = "fp8_e4m3", logits_soft_cap = true }}
because = "the kernel scales after the cap"

[[variants.v{j}.rules]]
when = {{ head_size = 256 }}
need = {{ block_size = {{ max = 64 }} }}
because = "shared memory"
"""


def install(folder: Path, variants: Sequence[int]) -> None:
    """
    Put distributions into a folder, which then goes on ``sys.path``.

    Args:
        folder: An empty folder.
        variants: How many variants each distribution's backend has.
    """
    for i, count in enumerate(variants):
        package = folder / f"attnplug_bench_{i}"
        package.mkdir()
        (package / "attnplug.toml").write_text(manifest(i, count), encoding="utf-8")
        (package / "__init__.py").touch()
        (package / "plugin.py").touch()
        metadata = folder / f"attnplug_bench_{i}-1.0.dist-info"
        metadata.mkdir()
        name = f"attnplug-bench-{i}"
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
        points = f"[attnplug.backends]\nbench_{i} = attnplug_bench_{i}.plugin\n"
        (metadata / "entry_points.txt").write_text(points, encoding="utf-8")


def shares(total: int, each: int) -> list[int]:
    """Split a number of variants over backends, so many to each, the rest to the last."""
    whole, rest = divmod(max(total, 0), each)
    return [each] * whole + [rest] * (rest > 0)


def manifest(i: int, variants: int) -> str:
    """Return the manifest of the `i`th backend. The variants differ, so that they answer a question differently."""
    parts = [_HEAD.format(i=i, last=variants - 1)]
    for j in range(variants):
        features = [name for k, name in enumerate(("sinks", "alibi", "dcp_size", "batch_invariant")) if (i + j + k) % 3]
        parts.append(
            _VARIANT.format(
                j=j,
                lacking=', "attnplug-bench-kernels >=2"' if (i + j) % 4 == 3 else "",
                step=(8, 16, 32, 64)[j % 4],
                most=(128, 256)[(i + j) % 2],
                block=(16, 64, 128)[(i + j) % 3],
                features=", ".join(f'"{name}"' for name in features),
            )
        )
    return "".join(parts)
