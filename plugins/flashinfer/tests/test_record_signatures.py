"""The script that records signatures: bases, overloads, and keywords that are passed on."""

from __future__ import annotations

import json
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

SOURCES = {
    "flashinfer/__init__.py": "from .attention import Sink as Sink\nfrom . import decode\nfrom .decode import merge\n",
    "flashinfer/attention/__init__.py": "from ._core import *\n",
    "flashinfer/attention/_core.py": (
        "from ..decode import Decode\n"
        "class Sink(Decode):\n"
        "    def __init__(self, workspace, kv_layout='NHD', *, window_left: int = -1): ...\n"
    ),
    "flashinfer/decode.py": (
        "import not_installed_anywhere\n"
        "from typing import overload\n"
        "class Decode:\n"
        "    def plan(self, indptr, *deprecated, q_len=1, **kwargs):\n"
        "        return self._plan_impl(indptr, q_len=q_len, **kwargs)\n"
        "    def _plan_impl(self, indptr, q_len, sm_scale=None): ...\n"
        "    @overload\n"
        "    def run(self, q, *, old=False): ...\n"
        "    def run(self, q, *args, lse=None): ...\n"
        "def merge(v, s, mask=None): ...\n"
        "def fast_plan(self, indptr): ...\n"
    ),
}
EXPECTED = {
    "Sink.__init__": [
        ("workspace", "POSITIONAL_OR_KEYWORD"),
        ("kv_layout", "POSITIONAL_OR_KEYWORD", "'NHD'"),
        ("window_left", "KEYWORD_ONLY", "-1"),
    ],
    "Sink.plan": [
        ("indptr", "POSITIONAL_OR_KEYWORD"),
        ("deprecated", "VAR_POSITIONAL"),
        ("q_len", "KEYWORD_ONLY", "1"),
        ("sm_scale", "KEYWORD_ONLY", "None"),
    ],
    "Sink.run": [("q", "POSITIONAL_OR_KEYWORD"), ("args", "VAR_POSITIONAL"), ("lse", "KEYWORD_ONLY", "None")],
    "merge": [
        ("v", "POSITIONAL_OR_KEYWORD"),
        ("s", "POSITIONAL_OR_KEYWORD"),
        ("mask", "POSITIONAL_OR_KEYWORD", "None"),
    ],
    "decode.fast_plan": [("self", "POSITIONAL_OR_KEYWORD"), ("indptr", "POSITIONAL_OR_KEYWORD")],
}


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    spec = spec_from_file_location("record_signatures", Path(__file__).with_name("record_signatures.py"))
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "CALLABLES", tuple(EXPECTED))
    monkeypatch.setattr(module, "FOLDER", tmp_path / "signatures")
    return module


def wheel(folder: Path, version: str, *changes: tuple[str, str]) -> str:
    path = folder / f"flashinfer_python-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, source in SOURCES.items():
            for old, new in changes:
                source = source.replace(old, new)  # noqa: PLW2901 - the changes accumulate
            archive.writestr(name, source)
    return str(path)


def test_signatures(recorder, tmp_path):
    assert recorder.Wheel(Path(wheel(tmp_path, "1.0"))).signatures() == EXPECTED


def test_files(recorder, tmp_path):
    changed = ("mask=None", "mask=None, base=2")
    recorder.main(
        [
            wheel(tmp_path, "1.10", changed),
            wheel(tmp_path, "1.9.post1"),
            wheel(tmp_path, "1.9.post2", changed),
            wheel(tmp_path, "1.9"),
        ]
    )
    found = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "signatures").iterdir()}
    assert set(found) == {"1.9", "1.9.post2", "1.10"}
    assert {name: [tuple(item) for item in items] for name, items in found["1.9"].items()} == EXPECTED
    assert found["1.10"]["merge"][-1] == ["base", "POSITIONAL_OR_KEYWORD", "2"]


def test_a_missing_callable(recorder, tmp_path):
    with pytest.raises(LookupError, match=r"1\.0: flashinfer/decode\.py does not have merge"):
        recorder.Wheel(Path(wheel(tmp_path, "1.0", ("def merge(", "def unite(")))).signatures()
