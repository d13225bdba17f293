"""The kit from the command line: its table, its files, its usage errors."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

import attnplug_kit
from tools import forked

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
KIT = Path(attnplug_kit.__file__).parent / "test_conformance.py"
# The file's folder has its own settings, by which a plugin that is registered before pytest begins is an error.
AS_A_FILE = ("-W", "ignore::pytest.PytestAssertRewriteWarning", f"{KIT}::TestBasic")
RUN = """
import sys
from pathlib import Path
import pytest
import attnplug
attnplug.register(sys.argv[1], manifest=Path(sys.argv[2]))
options = ["--attn-device=cpu", "-p", "no:cacheprovider", "-q", *sys.argv[3:]]
sys.exit(pytest.main(options))
"""


def run(
    folder: Path,
    *options: str,
    module: str = "minimal.least",
    manifest: Path = HERE / "minimal" / "attnplug.toml",
    tests: tuple[str, ...] = ("--pyargs", "attnplug_kit"),
) -> subprocess.CompletedProcess[str]:
    words = (module, str(manifest), "--rootdir", str(folder), *options, *tests)
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return forked.run("-c", RUN, *words, env=environment, cwd=folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, "--attn-backend=minimal", f"--attn-report={folder / 'report'}")


@pytest.mark.slow
def test_a_backend_that_declares_little_passes(whole) -> None:
    _, done = whole

    assert done.returncode == 0, done.stdout
    assert "declared values exercised: " in done.stdout
    assert "(100%)" in done.stdout
    assert "bfloat16   auto       output" in done.stdout


@pytest.mark.slow
def test_the_evidence_is_about_this_device(whole) -> None:
    folder, _ = whole
    evidence = json.loads((folder / "report" / "evidence-minimal-plain.json").read_text("utf-8"))

    assert evidence["format"] == 2
    assert evidence["backend"] == "minimal/plain"
    assert evidence["command"].startswith("pytest --attn-device=cpu")
    assert "--attn-report" not in evidence["command"]
    assert evidence["device"]["type"] == "cpu"
    assert evidence["passed"] is True
    assert evidence["kit_tests"]["ran"] == evidence["kit_tests"]["of"] > 100
    assert evidence["fraction"] == 1.0
    assert evidence["missing"] == []
    for name, value in (("dtype", "bfloat16"), ("batch_invariant", True), ("seq_lens_cpu_kind", "absent")):
        assert {"field": name, "value": value} in evidence["served"]
    assert evidence["ranges"]["query_len"][0] == evidence["ranges"]["num_reqs"][0] == 1
    assert evidence["ranges"]["seq_len"][1] > 1024
    (unreached,) = evidence["unreached"]
    assert (unreached["field"], unreached["value"]) == ("features", "minimal.open_feature")
    assert "test it beside the kit" in unreached["because"]
    assert {"attnplug", "python", "torch"} <= set(evidence["versions"])
    assert all(0 <= error["mean"] <= error["max"] for error in evidence["errors"])


@pytest.mark.slow
def test_the_report_has_every_test(whole) -> None:
    folder, _ = whole
    (report,) = json.loads((folder / "report" / "report.json").read_text("utf-8"))
    root = ET.parse(folder / "report" / "junit.xml").getroot()  # noqa: S314 - the run above wrote it

    assert sum(report["outcomes"].values()) == len(report["tests"])
    assert {test["outcome"] for test in report["tests"]} == {"passed", "skipped"}
    assert int(root[0].attrib["tests"]) >= len(report["tests"])
    assert any(item.attrib["name"] == "attnplug exercised" for item in root.iter("property"))


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_backend_like_a_vendors_library_passes(tmp_path: Path) -> None:
    manifest = HERE / "vendor" / "attnplug.toml"
    done = run(tmp_path, "--attn-backend=vendor", module="vendor.planned", manifest=manifest)

    assert done.returncode == 0, done.stdout
    assert "(100%)" in done.stdout
    assert "head_size          64, 128, 256" in done.stdout
    assert "block_size         16, 32, 64" in done.stdout
    assert "gqa_ratio          1, 2, 4, 8" in done.stdout
    assert "cudagraph          single_token_decode, uniform_batch, always" in done.stdout
    assert "out of reach: paged=False: does not support paged=False: the kernels read pages" in done.stdout
    assert "float32" not in done.stdout


def test_a_value_that_the_rules_always_refuse_fails(tmp_path: Path) -> None:
    text = (HERE / "vendor" / "attnplug.toml").read_text("utf-8")
    rule = "[[rules]]\nwhen = { sinks = true }\nbecause = 'not yet'\n\n[variants.planned]"
    (tmp_path / "attnplug.toml").write_text(text.replace("[variants.planned]", rule), "utf-8")
    done = run(
        tmp_path,
        "--attn-backend=vendor",
        "-k",
        "declared_values",
        module="vendor.planned",
        manifest=tmp_path / "attnplug.toml",
    )

    assert done.returncode == 1, done.stdout
    assert "declared, and refused in every request: sinks=True (does not support sinks=True: not yet)" in done.stdout
    assert "not exercised: sinks=True" in done.stdout


HOSTED = HERE / "hosted" / "attnplug.toml"


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_backend_with_quantized_queries_passes(tmp_path: Path) -> None:
    done = run(tmp_path, "--attn-backend=hosted", module="hosted.quantized_queries", manifest=HOSTED)

    assert done.returncode == 0, done.stdout
    assert "(100%)" in done.stdout
    assert "cudagraph          single_token_decode, uniform_batch" in done.stdout  # though each decode has one token


@pytest.mark.slow
@pytest.mark.unmeasured
def test_the_scale_of_quantized_queries_has_to_be_used(tmp_path: Path) -> None:
    selected = ("--attn-backend=hosted", "-k", "test_capability and (fp8 or head_scales)")
    done = run(tmp_path, *selected, module="hosted.forgets_query_scale", manifest=HOSTED)

    assert done.returncode == 1, done.stdout
    # The kit draws the other fields of the request.
    assert re.search(r"kv_cache_dtype=fp8_e4m3 .*paged=True per_head_scales=True.*: output: ", done.stdout)
    assert "3 failed, " in done.stdout


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_backend_without_pages_passes(tmp_path: Path) -> None:
    text = (HERE / "minimal" / "attnplug.toml").read_text("utf-8")
    text = text.replace('"paged", "batch_invariant", "seq_lens_cpu_kind"', '"batch_invariant"')
    text = text.replace("block_size = { multiple_of = 16 }", "")
    (tmp_path / "attnplug.toml").write_text(text, "utf-8")
    done = run(tmp_path, "--attn-backend=minimal", manifest=tmp_path / "attnplug.toml")

    assert done.returncode == 0, done.stdout
    assert "(100%)" in done.stdout


KNOWN = """
from attnplug_kit.conformance import Basic


class TestMinimal(Basic):
    backend = "minimal"
    known_failures = {"test_one_token": "it was so once"}
"""


def test_an_expected_failure_that_passes_fails(tmp_path: Path) -> None:
    (tmp_path / "test_known.py").write_text(KNOWN, "utf-8")
    done = run(tmp_path, "-k", "one_token or mixed", tests=(str(tmp_path / "test_known.py"),))

    assert done.returncode == 1, done.stdout
    assert "[XPASS(strict)] it was so once" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


def test_part_of_a_run_may_leave_values_out(tmp_path: Path) -> None:
    done = run(tmp_path, "--attn-backend=minimal/plain", "-k", "TestBasic and test_one_token")

    assert done.returncode == 0, done.stdout
    assert "not exercised: gqa_ratio=1, 4, 7, 8" in done.stdout


INHERITS_ONE = """
from attnplug_kit.conformance import LogSumExp


class TestMinimal(LogSumExp):
    backend = "minimal"
"""


@pytest.mark.parametrize(
    "options",
    [
        ["--pyargs", "attnplug_kit", "-k", "TestLogSumExp"],
        [*AS_A_FILE[:2], f"{KIT}::TestLogSumExp"],
        ["--pyargs", "attnplug_kit", "-k", "TestLogSumExp", "--maxfail=1"],
        ["test_one.py"],
    ],
    ids=["keyword", "id", "maxfail", "class"],
)
def test_part_of_the_kit_is_no_evidence(options, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(INHERITS_ONE, "utf-8")
    backend = [] if "test_one.py" in options else ["--attn-backend=minimal/plain"]
    done = run(tmp_path, *backend, "--attn-report=report", tests=tuple(options))

    assert done.returncode == 0, done.stdout
    said = re.search(r"part of the kit \((\d+) of (\d+) tests\): it is no evidence", done.stdout)
    assert said is not None, done.stdout
    written = json.loads((tmp_path / "report" / "evidence-minimal-plain.json").read_text("utf-8"))
    ran, whole = map(int, said.groups())
    assert 0 < ran < whole
    assert written["passed"] is False
    assert written["kit_tests"] == {"ran": ran, "of": whole}


@pytest.mark.slow
def test_a_run_in_several_processes_has_one_report(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist, which spreads tests over processes, is not installed")
    done = run(tmp_path, "--attn-backend=torch/sdpa", "-n2", "-k", "TestBasic", f"--attn-report={tmp_path / 'report'}")
    (report,) = json.loads((tmp_path / "report" / "report.json").read_text("utf-8"))

    assert done.returncode == 0, done.stdout
    assert done.stdout.count("torch/sdpa on cpu: ") == 1
    assert report["outcomes"] == {"passed": len(report["tests"])}
    assert {"field": "dtype", "value": "bfloat16"} in report["served"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--attn-backend=minimle"], "did you mean 'minimal/plain'?"),
        (["--attn-backend=torch/flex"], "cannot be tested on cpu"),
        ([], "pass --attn-backend=NAME[/variant], or name it in the class"),
        (["-n2"], "pass --attn-backend=NAME[/variant], or name it in the class"),
    ],
)
@pytest.mark.parametrize("tests", [("--pyargs", "attnplug_kit"), pytest.param(AS_A_FILE, marks=pytest.mark.slow)])
def test_a_backend_that_cannot_be_tested_is_one_usage_error(options, said, tests, tmp_path: Path) -> None:
    done = run(tmp_path, *options, tests=tests)

    require_usage_error(done, said)


def require_usage_error(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """Require that the run ends before any test, with one error of three parts."""
    reported = done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, reported
    assert reported.count("ERROR") == reported.count("\n  expected: ") == reported.count("\n  fix: ") == 1, reported
    assert "Traceback" not in reported
    assert "conformance.py:" not in reported
    assert [text for text in said if text not in reported] == [], reported
