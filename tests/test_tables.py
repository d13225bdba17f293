"""The reference pages that are made from data say what the data says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tools import capabilities, tables

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = """\
api = "1.0"
backend = { name = "acme", summary = "A backend" }
[supports]
device_type = "cuda"
compute_capability = { min = "8.0" }
dtype = ["bfloat16", "float16"]
head_size = { multiple_of = 8, max = 256 }
block_size = 16
features = ["paged", "acme.rope_fused"]
[[rules]]
when = { dtype = "float16" }
need = { head_size = 64 }
because = "the tile fits no other | size"
[variants.fast]
requires = ["acme-kernels >=1.2"]
install = { acme-kernels = "from its vendor" }
jit = "triton"
supports = { sinks = true }
[variants.slow]
emulates = { paged = "copies" }
[options.tiles]
type = "int"
min = 1
default = 4
help = "tiles per block"
"""


def _workspace(root: Path, manifest: str = MANIFEST) -> Path:
    folder = root / "plugins" / "acme" / "src" / "attnplug_acme"
    folder.mkdir(parents=True)
    (folder / "attnplug.toml").write_text(manifest, encoding="utf-8")
    return root


def _rows(page: str) -> dict[str, list[str]]:
    cells = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return {name.strip("`"): rest for name, *rest in cells}


def test_the_tables_are_up_to_date() -> None:
    assert tables.stale() == [], "run `make tables` and commit what it wrote"


def test_a_changed_manifest_makes_the_matrix_stale(tmp_path: Path) -> None:
    root = _workspace(tmp_path)

    assert tables.write(root) == list(tables.PAGES)
    assert tables.stale(root) == []
    file = root / "plugins/acme/src/attnplug_acme/attnplug.toml"
    file.write_text(MANIFEST.replace("max = 256", "max = 128"), encoding="utf-8")
    assert tables.stale(root) == ["docs/reference/capabilities.md"]


def test_the_matrix_shows_what_each_variant_declares(tmp_path: Path) -> None:
    rows = _rows(capabilities.page(_workspace(tmp_path)))

    assert rows["field"] == ["`fast`", "`slow`"]
    assert rows["head_size"] == ["multiples of 8 up to 256"] * 2
    assert rows["sinks"] == ["only", "-"]
    assert rows["paged"] == ["yes", "yes (slower)"]
    assert rows["needs"] == ["`acme-kernels >=1.2`", "-"]
    assert rows["compiles with"] == ["triton", "-"]
    assert rows["open features"] == ["`acme.rope_fused`"] * 2


def test_the_matrix_states_rules_options_and_what_is_refused(tmp_path: Path) -> None:
    page = capabilities.page(_workspace(tmp_path))

    assert (
        "- where *dtype = float16*, *head_size = 64* is needed (`fast`, `slow`): the tile fits no other | size" in page
    )
    assert "- `tiles` (int from 1, default `4`): tiles per block" in page
    assert "- `slow`, paged: copies" in page
    assert "- `fast`, `acme-kernels`: from its vendor" in page
    assert "`alibi`" in page.split("Not declared by any variant")[1].splitlines()[0]


def test_a_variant_that_no_report_covers_is_unverified(tmp_path: Path) -> None:
    root = _workspace(tmp_path)
    evidence = root / "docs" / "reference" / "evidence"
    evidence.mkdir(parents=True)
    (evidence / "index.md").write_text("acme/slow", encoding="utf-8")
    (evidence / "h200.md").write_text("| `test_values[acme/fast]` | passed | - |", encoding="utf-8")

    assert _rows(capabilities.page(root))["checked"] == ["[h200.md](evidence/h200.md)", "unverified"]
    (evidence / "forward-b200.md").write_text(
        "| backend | acme/slow |\n| acme/slow: `forward` | 1 us |", encoding="utf-8"
    )
    assert _rows(capabilities.page(root))["checked"][1] == "unverified"
    (evidence / "b200.md").write_text(
        "| `acme_backend/test_slow_on_gpu.py::test_values` | passed | - |", encoding="utf-8"
    )
    assert _rows(capabilities.page(root))["checked"][1] == "[b200.md](evidence/b200.md)"


def test_a_kit_run_in_the_distribution_covers_its_variant(tmp_path: Path) -> None:
    root = _workspace(tmp_path)
    folder = root / "plugins" / "acme" / "src" / "attnplug_acme" / "evidence"
    folder.mkdir()
    device = {"type": "cuda", "vendor": "nvidia", "name": "NVIDIA B200", "compute_capability": "10.0"}
    run = {"format": 1, "distribution": "attnplug-acme 1.0", "device": device, "served": [], "unreached": []}
    for variant, passed in (("fast", True), ("slow", False)):
        text = json.dumps({**run, "backend": f"acme/{variant}", "passed": passed})
        (folder / f"{variant}-b200.json").write_text(text, encoding="utf-8")

    assert _rows(capabilities.page(root))["checked"] == ["kit (NVIDIA B200)", "unverified"]


def test_a_variant_for_the_cpu_is_checked_by_every_run(tmp_path: Path) -> None:
    manifest = MANIFEST.replace('device_type = "cuda"', 'device_type = ["cpu", "cuda"]')

    assert _rows(capabilities.page(_workspace(tmp_path, manifest)))["checked"] == ["`make test` (CPU)"] * 2
