"""Whatever a distribution contains, the good one beside it is listed and selected, and nothing is raised."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.cli.doctor.report import _problems_of_candidates
from attnplug.cli.list import _row, describe
from attnplug.discovery.plugin import read_plugin
from attnplug.discovery.registry import Registry
from attnplug.discovery.scan import scan
from attnplug.evidence.store import EvidenceStore
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import process
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

GOOD = """\
api = "1.0"
backend = { name = "good", summary = "serves everything" }
[supports]
device_type = "cpu"
dtype = ["float32", "bfloat16"]
head_size = { min = 1 }
block_size = { min = 1 }
features = ["paged"]
[variants.default]
requires = ["spoiled-one >=0.5; python_version >= '3'"]
[variants.other]
"""
SPOILED = """\
api = "1.0"
backend = { name = "spoiled", aliases = ["SPOILED"], summary = "an example" }
[supports]
device_type = ["cpu", "cuda"]
dtype = ["bfloat16", "float16"]
head_size = { multiple_of = 8, max = 256 }
block_size = [128, { multiple_of = 16 }]
logits_soft_cap = { max = 50.0 }
compute_capability = ["9.0a", { min = "10.0", max = "11.0" }]
features = ["paged", "sliding_window", "acme.fused"]
[[rules]]
when = { sliding_window = true, installed = "spoiled-one <2" }
need = { head_size = { max = 128 }, logits_soft_cap = false }
because = "wrong values before version 2"
[variants.fast]
summary = "the fast one"
requires = ["spoiled-one >=0.5", "library >2; os_name == 'posix'"]
jit = "triton"
supports = { block_sparse = { stride = 8 } }
emulates = { paged = "gathers" }
[variants.fast.install]
spoiled-one = "from its vendor"
[variants.slow]
[[prefer]]
order = ["slow", "fast"]
because = "faster"
[options.ratio]
type = "int"
min = 1
default = 4
help = "a ratio"
"""
EVIDENCE = json.dumps(
    {
        "format": 1,
        "backend": "spoiled/slow",
        "distribution": "spoiled-one 1.0",
        "passed": True,
        "device": {"type": "cpu", "name": "a CPU"},
        "served": [{"field": "head_size", "value": 64}, {"field": "dtype", "value": "bfloat16"}],
        "unreached": [{"field": "features", "value": "sliding_window", "because": "why"}],
        "features": ["acme.fused"],
    }
)
FILES = {
    "spoiled_one-1.0.dist-info/METADATA": "Metadata-Version: 2.4\nName: spoiled-one\nVersion: 1.0\n",
    "spoiled_one-1.0.dist-info/entry_points.txt": "[attnplug.backends]\nspoiled = spoiled_package.plugin\n",
    "spoiled_package/attnplug.toml": SPOILED,
    "spoiled_package/evidence/run.json": EVIDENCE,
}
ODD = (
    *("1e400", "-1", "0", "nan", "inf", "true", "2026-01-01", "[]", "{}", "[[]]", "''", "{ min = 3, max = 1 }"),
    *("9" * 30, "9" * 5000, "0x" + "f" * 5000, f'"{"9" * 5000}"', f'"{"9" * 5000}.1"', f"{'[' * 500}{']' * 500}"),
    *(f"{{ a{'.a' * 3000} = 1 }}", '"' + "x" * 5000 + '"', "\"x; os_name ~= 'y'\"", '["x >=1; y ~= 2"]', '"\\u0000"'),
    *('["spoiled-one ==' + "1." * 400 + '1"]', '"good"', '["good", "good"]', '{ min = "9.0" }', '{ stride = "x" }'),
)
PIECES = st.one_of(st.binary(max_size=20), st.sampled_from(ODD).map(str.encode), st.sampled_from([b"\n", b"[", b"\0"]))


@st.composite
def spliced(draw: st.DrawFn, text: str) -> bytes:
    """Return a text, parts of which were replaced, removed or repeated."""
    content = text.encode()
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = min(len(content), start + draw(st.integers(0, 40)))
        content = content[:start] + draw(PIECES) * draw(st.integers(0, 2)) + content[end:]
    return content


@st.composite
def with_odd_values(draw: st.DrawFn, text: str) -> bytes:
    """Return a text of lines, the values of some of which were replaced."""
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(lines) - 1))
        key, equals, value = lines[at].partition("=")
        inner, colon, _ = value.partition("=")
        keep = f"{inner}{colon}" if colon and draw(st.booleans()) else ""
        lines[at] = f"{key}{equals}{keep} {draw(st.sampled_from(ODD))}{' }' if keep.lstrip().startswith('{') else ''}"
    return "\n".join(lines).encode()


MUTATIONS = st.sampled_from(sorted(FILES)).flatmap(
    lambda name: st.tuples(st.just(name), st.one_of(spliced(FILES[name]), with_odd_values(FILES[name])))
)


@contextmanager
def site(mutations: list[tuple[str, bytes]]) -> Iterator[str]:
    """Yield a folder on the path, with a good distribution and a mutated one."""
    good = {
        "attnplug_good-1.0.dist-info/METADATA": "Name: attnplug-good\nVersion: 1.0\n",
        "attnplug_good-1.0.dist-info/entry_points.txt": "[attnplug.backends]\ngood = good_package.plugin\n",
        "good_package/attnplug.toml": GOOD,
        "good_package/__init__.py": "raise SystemExit('imported')",
        "spoiled_package/__init__.py": "raise SystemExit('imported')",
    }
    files = {name: text.encode() for name, text in (good | FILES).items()} | dict(mutations)
    before = sys.path[:], process.PROCESS.state
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        sys.path.insert(0, folder)
        try:
            yield folder
        finally:
            sys.path[:], process.PROCESS.state = before
            sys.path_importer_cache.pop(folder, None)


SEVERAL = st.lists(MUTATIONS, min_size=1, max_size=3)


@given(SEVERAL)
@settings(max_examples=50)
def test_a_mutated_distribution_harms_no_other(mutations: list[tuple[str, bytes]]) -> None:
    check(mutations)


@pytest.mark.slow
@given(SEVERAL)
@settings(max_examples=examples(1000))
def test_many_mutated_distributions_harm_no_other(mutations: list[tuple[str, bytes]]) -> None:
    check(mutations)


def check(mutations: list[tuple[str, bytes]]) -> None:
    """Check that every command serves the good distribution."""
    with site(mutations) as folder:
        found = scan([folder])
        assume([entry.name for entry in found.entries].count("good") == 1)  # of two with one name, neither wins
        registry = Registry(map(read_plugin, found.entries), found.notes, version_of=found.version_of)
        state = process.ProcessState(registry, Settings(), registry.generation, own_device=Device.cpu())
        process.PROCESS.state = state
        candidates = registry.candidates()
        store = EvidenceStore(registry.plugins)
        requirements = attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16", paged=True)

        assert {c.id: c.availability for c in candidates}["good/other"] == "ready"
        assert attnplug.select(requirements, backend=["good", "auto"]).id.startswith("good/")
        assert attnplug.select(requirements).id.partition("/")[0] in ("good", "spoiled")
        explanation = attnplug.explain(requirements, "cuda:9.0")
        assert "good/other" in str(explanation)
        assert json.dumps(explanation.to_dict())
        assert json.dumps(describe(candidates, registry, store, Device.cpu()))
        assert "good/other" in [_row(candidate, store, Device.cpu()).id for candidate in candidates]
        assert all(problem.fix for problem in _problems_of_candidates(candidates))
        assert all(map(str, (*registry.notes, *store.notes())))
