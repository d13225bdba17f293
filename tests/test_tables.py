"""The reference pages that are made from data say what the data says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

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
    assert tables.stale(root) == ["docs/assets/can-i-use.json"]
    file.write_text(MANIFEST.replace("tiles per block", "tiles in a block"), encoding="utf-8")
    assert "docs/reference/capabilities.md" in tables.stale(root)


def test_the_page_has_what_each_variant_needs(tmp_path: Path) -> None:
    rows = _rows(capabilities.page(_workspace(tmp_path)))

    assert rows["variant"] == ["needs", "compiles with", "open features", "reports"]
    assert rows["fast"] == ["`acme-kernels >=1.2`", "triton", "`acme.rope_fused`", "-"]


def _cells(root: Path, device: str = "9.0 (H100)", variant: str = "acme/fast") -> dict[str, tuple[str, str, list[str]]]:
    """Return the status, the reason and the devices of the runs of each feature."""
    found = json.loads(capabilities.data(root))
    cells = zip(found["features"], found["cells"][variant][device], strict=True)
    return {
        label: (
            ("run", "declared", "refused")[status],
            found["texts"][because],
            [found["runs"][place]["device"] for place in runs],
        )
        for (_, label), (status, because, _, *runs) in cells
    }


def test_the_matrix_has_the_reason_of_a_refusal(tmp_path: Path) -> None:
    root = _workspace(tmp_path)

    assert _cells(root)["sinks"] == ("declared", "no run of the conformance kit on cuda:9.0 is known", [])
    assert _cells(root, variant="acme/slow")["sinks"][:2] == ("refused", "does not support sinks=True")
    assert "slower: copies" in _cells(root, variant="acme/slow")["paged"][1]
    assert _cells(root, "CPU")["sinks"][1] == "requires device type cuda; the device is cpu"


def test_a_rule_that_refuses_every_request_is_the_reason(tmp_path: Path) -> None:
    only = MANIFEST.replace('dtype = ["bfloat16", "float16"]', 'dtype = "float16"')

    status, because, _ = _cells(_workspace(tmp_path, only))["head_size=128"]

    assert status == "refused"
    assert because.endswith("the tile fits no other | size")


def test_the_matrix_states_rules_options_and_what_is_refused(tmp_path: Path) -> None:
    page = capabilities.page(_workspace(tmp_path))

    assert (
        "- where *dtype = float16*, *head_size = 64* is needed (`fast`, `slow`): the tile fits no other | size" in page
    )
    assert "- `tiles` (int from 1, default `4`): tiles per block" in page
    assert "- `slow`, paged: copies" in page
    assert "- `fast`, `acme-kernels`: from its vendor" in page


def test_a_report_with_tests_of_a_variant_is_linked(tmp_path: Path) -> None:
    root = _workspace(tmp_path)
    evidence = root / "docs" / "reference" / "evidence"
    evidence.mkdir(parents=True)
    (evidence / "index.md").write_text("acme/slow", encoding="utf-8")
    (evidence / "h200.md").write_text(
        "| `test_values[acme/fast]` | passed | - |\n| `acme/slow_vendor` | `test_values.py` | 2 |", encoding="utf-8"
    )

    rows = _rows(capabilities.page(root))
    assert (rows["fast"][-1], rows["slow"][-1]) == ("[h200.md](evidence/h200.md)", "-")
    (evidence / "forward-b200.md").write_text(
        "| backend | acme/slow |\n| acme/slow: `forward` | 1 us |", encoding="utf-8"
    )
    assert _rows(capabilities.page(root))["slow"][-1] == "-"
    (evidence / "b200.md").write_text(
        "| `acme_backend/test_slow_on_gpu.py::test_values` | passed | - |", encoding="utf-8"
    )
    assert _rows(capabilities.page(root))["slow"][-1] == "[b200.md](evidence/b200.md)"


def _add_run(root: Path, name: str = "fast-b200", **changed: object) -> None:
    folder = root / "plugins" / "acme" / "src" / "attnplug_acme" / "evidence"
    folder.mkdir(exist_ok=True)
    device = {"type": "cuda", "vendor": "nvidia", "name": "NVIDIA B200", "compute_capability": "10.0"}
    run = {"format": 1, "backend": "acme/fast", "distribution": "attnplug-acme 0", "device": device, "passed": True}
    served = [{"field": "sinks", "value": True}, {"field": "head_size", "value": 64}]
    text = json.dumps({**run, "served": served, "unreached": [], **changed})
    (folder / f"{name}.json").write_text(text, encoding="utf-8")


def test_a_kit_run_verifies_what_it_served_on_its_device(tmp_path: Path) -> None:
    root = _workspace(tmp_path)
    _add_run(root)

    there = _cells(root, "10.0 (B200)")
    assert there["sinks"] == ("run", "", ["NVIDIA B200"])
    assert there["head_size=64"][0] == "run"
    assert there["head_size=128"] == ("declared", "head_size=128 (verified is 64)", [])
    assert _cells(root)["sinks"][0] == "declared"  # on another device
    assert _cells(root, "10.0 (B200)", "acme/slow")["head_size=64"][0] == "declared"


@pytest.mark.parametrize(
    "changed",
    [{"passed": False}, {"distribution": "attnplug-acme 1.0"}, {"kit_tests": {"ran": 3, "of": 9}}],
    ids=["failed", "of another version", "a part of the kit"],
)
def test_a_run_that_does_not_count_verifies_nothing(tmp_path: Path, changed: dict[str, object]) -> None:
    root = _workspace(tmp_path)
    _add_run(root, **changed)

    assert {status for status, _, _ in _cells(root, "10.0 (B200)").values()} == {"declared"}


def test_a_cell_is_run_where_a_shipped_file_has_its_value() -> None:
    """Read from the files alone, for every cell of the documentation, in both directions."""
    found = json.loads((tables.ROOT / capabilities.DATA).read_text("utf-8"))
    versions = {each["id"]: each["distribution"] for each in found["candidates"]}
    places = ("core/src/**/evidence/*.json", "plugins/*/src/**/evidence/*.json")
    files = [json.loads(path.read_text("utf-8")) for place in places for path in tables.ROOT.glob(place)]

    wrong = []
    for variant, devices in found["cells"].items():
        for device, cells in devices.items():
            own = [
                run
                for run in files
                if (run["backend"], run["distribution"]) == (variant, versions[variant])
                and run["device"].get("compute_capability", "CPU") == device.split()[0]
            ]
            for (field, label), (status, *_) in zip(found["features"], cells, strict=True):
                if field != "block_sparse" and any(_served(run, field, label) for run in own) != (status == 0):
                    wrong.append(f"{variant} on {device}: {label}")

    assert sum(map(len, found["cells"].values())) == len(versions) * len(capabilities.DEVICES)
    assert wrong == []


def _served(run: dict[str, Any], field: str, label: str) -> bool:
    value = label.partition("=")[2] or "True"
    if field in run["ranges"]:
        low, high = run["ranges"][field]
        return bool(low <= float(value) <= high)
    return any((item["field"], str(item["value"])) == (field, value) for item in run["served"])
