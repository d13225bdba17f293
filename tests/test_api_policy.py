"""What docs/reference/api-policy.md says of the `api` of a manifest is what core does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tools.forked import run_fresh

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = """\
api = "1.0"
backend = { name = "acme", summary = "A backend" }
[supports]
device_type = "cpu"
dtype = "float32"
head_size = 64
features = ["causal"]
"""
# Registers the manifest that the command line names, and prints the error, or what discovery says of the backend.
CODE = """
import json, sys
import attnplug
try:
    attnplug.register("acme.plugin", manifest=sys.argv[1])
except attnplug.AttnplugError as error:
    print(json.dumps({"error": type(error).__name__}))
else:
    request = attnplug.Requirements(
        head_size=64, num_q_heads=1, num_kv_heads=1, dtype="float32", paged=False, **json.loads(sys.argv[2])
    )
    verdicts = attnplug.explain(request, attnplug.Device("cpu")).verdicts
    own = next(verdict for verdict in verdicts if verdict.id == "acme/default")
    notes = [note.message for note in attnplug.registry().notes if "'acme'" in note.message]
    print(json.dumps({"codes": [reason.code for reason in own.reasons], "notes": notes}))
assert "acme" not in sys.modules
"""


def _answer(tmp_path: Path, manifest: str, **fields: object) -> dict[str, Any]:
    path = tmp_path / "attnplug.toml"
    path.write_text(manifest, encoding="utf-8")
    done = run_fresh("-c", CODE, str(path), json.dumps(fields))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_same_minor_version_is_used_without_a_diagnostic(tmp_path: Path) -> None:
    assert _answer(tmp_path, MANIFEST) == {"codes": [], "notes": []}


def test_a_newer_minor_version_is_used_with_a_diagnostic(tmp_path: Path) -> None:
    found = _answer(tmp_path, MANIFEST.replace('"1.0"', '"1.99"'))

    assert found["codes"] == []
    assert len(found["notes"]) == 1
    assert "1.99" in found["notes"][0]
    assert "1.0" in found["notes"][0]


@pytest.mark.parametrize(
    ("api", "error"),
    [
        ('api = "2.0"', "ApiVersionError"),
        ('api = "0.9"', "ApiVersionError"),
        ('api = "1"', "ManifestError"),
        ("api = 1.0", "ManifestError"),
        ("", "ManifestError"),
    ],
)
def test_other_versions_are_errors(api: str, error: str, tmp_path: Path) -> None:
    assert _answer(tmp_path, MANIFEST.replace('api = "1.0"', api)) == {"error": error}


UNKNOWN = {
    "a field": ("head_size = 64", 'head_size = 64\nrotary = "neox"'),
    "a feature": ('"causal"', '"causal", "rotary_cache"'),
    "a key": ("[supports]", "[novel]\nkey = 1\n[supports]"),
    "a condition": ("[supports]", '[[rules]]\nwhen = { rotary = "neox" }\nbecause = "x"\n[supports]'),
    "a value": ("head_size = 64", 'head_size = 64\nattn_type = "novel"'),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_parts_of_a_newer_minor_version(name: str, tmp_path: Path) -> None:
    known = MANIFEST.replace(*UNKNOWN[name])
    newer = known.replace('"1.0"', '"1.99"')

    assert _answer(tmp_path, known) == {"error": "ManifestError"}
    if name in ("a field", "a feature"):
        assert _answer(tmp_path, newer)["codes"] == []
    else:
        assert _answer(tmp_path, newer) == {"error": "ManifestError"}


def test_a_field_that_is_not_declared_rejects_other_values(tmp_path: Path) -> None:
    assert _answer(tmp_path, MANIFEST, sinks=True)["codes"] == ["undeclared"]
    assert _answer(tmp_path, MANIFEST.replace('"causal"', '"causal", "sinks"'), sinks=True)["codes"] == []
