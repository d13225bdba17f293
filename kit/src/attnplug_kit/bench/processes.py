"""
Fresh interpreters to measure in, with made-up plugins: a cost that a process has once can't be measured a second time.

The made-up plugins are distributions with metadata, entry points and manifests, and without code. Their manifests are
as long as those of real kernel libraries: alternatives, rules, preferences, options.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from attrs import asdict, frozen

from attnplug import AttnplugError, errors
from attnplug.commands import describe_error
from attnplug.request import PREFIX

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug_kit.bench.result import SectionResult
    from attnplug_kit.bench.rig import Target

_SECTION: Final = "from attnplug_kit.bench.processes import print_section; print_section({!r}, {!r}, {!r})"


@frozen
class Interpreter:
    """
    This Python, started anew each time, without any settings of attnplug.

    Attributes:
        folder: A folder that is first on ``sys.path``.
    """

    folder: Path

    def seconds(self, *arguments: str) -> float:
        """Return how long a process takes, from its start to its end."""
        start = time.perf_counter()
        self._run(arguments)
        return time.perf_counter() - start

    def json_of(self, code: str) -> Any:
        """Run code that prints one JSON document, and return it."""
        return json.loads(self._run(["-c", code]))

    def _run(self, arguments: Sequence[str]) -> str:
        done = subprocess.run(  # noqa: S603 - this interpreter, and code of this package
            [sys.executable, *arguments], capture_output=True, text=True, check=False, env=self._environment()
        )
        if done.returncode:
            raise AttnplugError(
                f"a measuring process ended with {done.returncode}",
                f"it printed\n{done.stderr.strip()}",
                "see whether `attnplug doctor` finds a problem",
            )
        return done.stdout

    def _environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH", "")]))
        return {**own, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(self.folder)}


@contextmanager
def interpreter(variants: Sequence[int] = ()) -> Iterator[Interpreter]:
    """
    Yield an interpreter that finds made-up plugins beside what is installed.

    Args:
        variants: How many variants each made-up backend has.
    """
    with TemporaryDirectory() as folder:
        for number, count in enumerate(variants):
            _write_plugin(Path(folder), number, count)
        yield Interpreter(Path(folder))


def measure_in_process(section: str, repeats: int, target: Target) -> SectionResult:
    """
    Return what ``measure_here`` of a module of this package returns in a fresh process.

    Raises:
        AttnplugError: What it raised there, with the same three parts.
    """
    from attnplug_kit.bench.result import SectionResult  # noqa: PLC0415 - children measure imports

    with interpreter() as python:
        found = python.json_of(_SECTION.format(section, repeats, asdict(target)))
    if "error" in found:
        error = found["error"]
        kind: type[AttnplugError] = getattr(errors, error["type"])
        raise kind(error["problem"], error["expected"], error["fix"])
    return SectionResult.from_dict(found["result"])


def print_section(section: str, repeats: int, target: dict[str, Any]) -> None:
    """Measure a section, and print one JSON document; all other output goes to standard error."""
    from attnplug_kit.bench.rig import Target  # noqa: PLC0415 - likewise

    sys.stdout.flush()
    ours = os.dup(1)
    os.dup2(2, 1)  # compilers that a plugin starts print there too
    try:
        measured = import_module(f"attnplug_kit.bench.{section}").measure_here(repeats, Target(**target))
        document = {"result": measured.to_dict()}
    except AttnplugError as error:
        document = {"error": describe_error(error)}
    sys.stdout.flush()
    with os.fdopen(ours, "w", encoding="utf-8") as out:
        json.dump(document, out)


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
requires = ["attnplug >=0.1,<99"{missing}]

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


def manifest_text(i: int, variants: int) -> str:
    """Return the manifest of the `i`th made-up backend. The variants differ in what they serve."""
    parts = [_HEAD.format(i=i, last=variants - 1)]
    for j in range(variants):
        features = [name for k, name in enumerate(("sinks", "alibi", "dcp_size", "batch_invariant")) if (i + j + k) % 3]
        parts.append(
            _VARIANT.format(
                j=j,
                missing=', "attnplug-bench-kernels >=2"' if (i + j) % 4 == 3 else "",
                step=(8, 16, 32, 64)[j % 4],
                most=(128, 256)[(i + j) % 2],
                block=(16, 64, 128)[(i + j) % 3],
                features=", ".join(f'"{name}"' for name in features),
            )
        )
    return "".join(parts)


def shares(total: int, each: int) -> list[int]:
    """Split a number of variants over backends, so many to each, the rest to the last."""
    full, rest = divmod(max(total, 0), each)
    return [each] * full + [rest] * (rest > 0)


def _write_plugin(folder: Path, i: int, variants: int) -> None:
    """Install the `i`th made-up plugin into a folder, as pip would."""
    metadata = f"attnplug_bench_{i}-1.0.dist-info"
    points = f"[attnplug.backends]\nbench_{i} = attnplug_bench_{i}.plugin\n"
    files = {
        f"attnplug_bench_{i}/__init__.py": "",
        f"attnplug_bench_{i}/plugin.py": "",
        f"attnplug_bench_{i}/attnplug.toml": manifest_text(i, variants),
        f"{metadata}/METADATA": f"Metadata-Version: 2.1\nName: attnplug-bench-{i}\nVersion: 1.0\n",
        f"{metadata}/entry_points.txt": points,
    }
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
