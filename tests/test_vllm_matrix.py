"""The matrix of vLLM's versions and features: from results of tests alone, with a row for every feature."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import vllm_matrix, vllm_results

ROOT = Path(__file__).parents[1]
ISSUE = """
prefill; chunked prefill; prefix caching; mixed batches with one-token prompts last; preemption; soft cap; sinks;
ALiBi; sliding windows beside full layers in one KV-cache group;
FP8 KV cache, scales per tensor; FP8 KV cache, scales per head;
KV sharing; encoder-only models; cascade attention; CUDA graphs, FULL_DECODE_ONLY; CUDA graphs, FULL_AND_PIECEWISE;
torch.compile, mode 3; DCP; uniform decodes of speculative decoding; model runner V1; model runner V2;
int8 KV cache, level 1; int8 KV cache, level 2; Phi-3-small, block-sparse; no kernel library;
MLA; output quantization; mm_prefix; R-SWA; PCP
"""
"""Every feature that vLLM's models and engine have of an attention backend, as the project lists them."""

VERSIONS = ("0.26.0", "0.32.0", "0.33.0")
CASES = """\
import pytest
import vllm

@pytest.mark.feature("prefill", "soft cap")
@pytest.mark.parametrize("size", [1, 2])
def test_steps(size):
    pass

@pytest.mark.feature("prefill")
@pytest.mark.needs_engine
def test_engine():
    assert False

@pytest.mark.feature("MLA", kind="refused")
def test_refused():
    pass

@pytest.mark.feature("prefill")
@pytest.mark.parametrize("whose", [pytest.param("vLLM's", marks=pytest.mark.feature(kind="reference"))])
def test_reference(whose):
    pass

@pytest.mark.feature("cascade attention")
def test_absent():
    pytest.skip("this version of vLLM looks for no shared prefixes")

@pytest.mark.feature("sinks")
def test_skipped():
    pytest.skip("a library is missing")

def test_no_feature():
    pass
"""


def listed() -> list[dict[str, object]]:
    """Return the committed runs."""
    return vllm_results.read(ROOT / vllm_matrix.RESULTS)


def rows(page: str) -> dict[str, list[str]]:
    """Return the cells of the matrix by feature."""
    matrix = page.partition("## Served")[2].partition("## Runs")[0]
    lines = [line.strip("| ").split(" | ") for line in matrix.splitlines() if line.startswith("| ")]
    return {name: cells for name, *cells in lines}


def test_every_feature_of_the_issue_is_a_row() -> None:
    found = rows((ROOT / "docs/reference/vllm-matrix.md").read_text("utf-8"))

    assert [name for name in map(str.strip, ISSUE.split(";")) if name not in found] == []


def test_the_page_is_what_the_results_say() -> None:
    assert (ROOT / "docs/reference/vllm-matrix.md").read_text("utf-8") == vllm_matrix.page(ROOT)


def test_every_version_that_is_tested_is_a_column() -> None:
    assert [run["vllm"] for run in listed() if run["device"] == "CPU"] == list(VERSIONS)


def test_no_committed_result_is_a_failure() -> None:
    found = [cell for cells in rows(vllm_matrix.page(ROOT)).values() for cell in cells]

    assert found
    assert not [cell for cell in found if "fails" in cell]


def test_results_are_of_tests_that_are_there() -> None:
    tests = {str(result["test"]) for run in listed() for result in run["results"]}  # type: ignore[attr-defined]

    assert tests
    gone = [
        test
        for test in tests
        if f"def {test.partition('::')[2]}(" not in (ROOT / test.partition("::")[0]).read_text("utf-8")
    ]
    assert gone == [], "repeat the runs that docs/reference/vllm-matrix.md names"


def test_every_feature_of_a_test_is_in_the_results() -> None:
    """A feature's name is a literal in the tests, or in a table beside them."""
    texts = {
        node.value
        for file in (ROOT / "hosts/vllm/tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    shown = {str(result["feature"]) for run in listed() for result in run["results"]}  # type: ignore[attr-defined]

    on_gpu = {"torch.compile, mode 3"}
    assert {name for name in vllm_matrix.FEATURES if name in texts} - on_gpu <= shown


def run(folder: Path, cases: str = CASES, version: str = "0.32.0+cpu") -> subprocess.CompletedProcess[str]:
    """Run tests under the workspace's plugin, with a vLLM that has a version only."""
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n feature: as in the workspace\n needs_engine: likewise\n")
    (folder / "test_cases.py").write_text(cases, encoding="utf-8")
    (folder / "vllm.py").write_text(f"__version__ = {version!r}\n", encoding="utf-8")
    (folder / "torch.py").write_text(
        "class cuda:\n    is_available = staticmethod(lambda: False)\nmanual_seed = print\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--feature-report", "found.json"]
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "REVISION": "abc"}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


def test_outcomes_are_recorded_by_feature_and_kind(tmp_path: Path) -> None:
    run(tmp_path)

    text = (tmp_path / "found.json").read_text("utf-8")
    (found,) = json.loads(text)["runs"]
    assert (found["vllm"], found["device"], found["revision"]) == ("0.32.0", "CPU", "abc")
    of = {(each["feature"], each["kind"]): each for each in found["results"]}
    assert of["prefill", "steps"] == {
        "feature": "prefill", "kind": "steps", "test": "test_cases.py::test_steps", "passed": 2
    }  # fmt: skip
    assert of["soft cap", "steps"]["passed"] == 2
    assert of["prefill", "engine"]["failed"] == 1
    assert of["MLA", "refused"]["passed"] == 1
    assert of["cascade attention", "steps"]["absent"] == 1
    assert of["sinks", "steps"]["skipped"] == 1
    assert len(of) == len(found["results"]) == 6
    assert "found.json" not in text


def test_a_run_replaces_the_one_of_its_version_and_device(tmp_path: Path) -> None:
    def of(vllm: str, device: str, passed: int) -> dict[str, object]:
        return {"vllm": vllm, "device": device, "results": [result(passed=passed), result(passed=passed)]}

    file = tmp_path / "found.json"
    vllm_results.write(file, [of("0.100.0", "CPU", 1), of("0.32.0", "NVIDIA H200", 2), of("0.32.0", "CPU", 3)])
    vllm_results.write(file, [of("0.32.0", "CPU", 4)])

    assert vllm_results.read(file) == [of("0.32.0", "CPU", 4), of("0.100.0", "CPU", 1), of("0.32.0", "NVIDIA H200", 2)]
    assert vllm_results.read(tmp_path / "none.json") == []


@pytest.mark.parametrize("mark", ['"rotary embeddings"', '"prefill", kind="guess"'])
def test_a_feature_or_kind_without_a_row_is_refused(tmp_path: Path, mark: str) -> None:
    done = run(tmp_path, f"import pytest\n\n@pytest.mark.feature({mark})\ndef test_one():\n    pass\n")

    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "Features and kinds are those of tools/vllm_matrix.py" in done.stdout + done.stderr


def result(**counts: int) -> dict[str, object]:
    return {"feature": "prefill", "kind": "steps", "test": "t.py::test", **counts}


@pytest.mark.parametrize(
    ("results", "cell"),
    [
        ([], "no test"),
        ([result(skipped=3)], "no test"),
        ([result(absent=1)], "not in this version"),
        ([result(absent=1, passed=2)], "hand-made steps (2)"),
        (
            [result(passed=2), result(passed=3), {**result(passed=1), "kind": "engine"}],
            "whole engine (1), hand-made steps (5)",
        ),
        ([{**result(passed=4), "kind": "refused"}], "refused (4)"),
        ([result(passed=2, failed=1)], "**fails** (1)"),
    ],
)
def test_a_cell_says_what_was_shown(results: list[dict[str, object]], cell: str) -> None:
    assert vllm_matrix.cells(results)["prefill"] == cell


REPORT = """\
- device: NVIDIA H200, driver 1
- versions: vLLM 0.26.0 with its FlashAttention 3

## Logprobs

Tokens are generated twice, so that
prefixes are cached the second time.

| candidate | model | mode | mean error |
| --- | --- | --- | --- |
| `flash_attn/fa3_vllm` | Llama | eager | 0.0806 |
| | Llama | decode graphs | 0.0806 |
| | Llama | compiled, full and piecewise graphs | 0.0829 |
| | Llama | decode graphs, model runner V2 | 0.0806 |
| | Gemma 2 (window, soft cap) | decode graphs | 0.0222 |
| `int8_ixformer/triton`, int8 keys | Llama | eager | 0.167 |

Phi-3-small: eager 1 of 60 tokens differs; compiled 0 of 60.

| candidate | mode | mean error |
| --- | --- | --- |
| `flash_attn/fa3_vllm` | eager | 0.5436 |
| | compiled, full and piecewise graphs | 0.5655 |

## Throughput

| `flash_attn/fa3_vllm` | Llama | compiled |
"""


def test_a_column_of_a_report_counts_its_rows() -> None:
    head, cells = vllm_matrix.of_report(REPORT)

    assert head == "0.26.0, NVIDIA H200"
    shown = {name: int(cell.rpartition("(")[2].rstrip(")")) for name, cell in cells.items() if cell != "no test"}
    assert shown == {
        "prefill": 6,
        "prefix caching": 1,
        "sliding windows beside full layers in one KV-cache group": 1,
        "soft cap": 1,
        "FP8 KV cache, scales per tensor": 2,
        "int8 KV cache, level 2": 1,
        "CUDA graphs, FULL_DECODE_ONLY": 3,
        "CUDA graphs, FULL_AND_PIECEWISE": 2,
        "torch.compile, mode 3": 2,
        "model runner V1": 7,
        "model runner V2": 1,
        "Phi-3-small, block-sparse": 2,
    }
    assert cells["soft cap"] == "[whole engine](evidence/vllm-h200.md) (1)"


def test_the_report_has_a_column() -> None:
    _, cells = vllm_matrix.of_report((ROOT / vllm_matrix.REPORT).read_text("utf-8"))

    assert all(cells[name] != "no test" for name in vllm_matrix.REPORTED)
