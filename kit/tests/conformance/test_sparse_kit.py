"""The kit on a backend that serves block-sparse patterns only, and on mutants of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from attnplug.evidence.coverage import hashable
from attnplug.evidence.store import parse_evidence
from attnplug_kit.oracle import attend, seen_by
from attnplug_kit.oracle.attention import FULL_PATTERN, has_known_parameters
from kit.tests.conformance import test_mutants
from kit.tests.conformance.test_kit_runs import run

HERE = Path(__file__).parent
MANIFEST = HERE / "sparse" / "attnplug.toml"
MUTANTS = {
    "ignores_pattern": ("test_feature_is_used[*", "was requested, and the output is that of a request without it"),
    "forgets_vertical": ("test_capability[*local_blocks*", "output: * elements differ"),
    "slides_no_head": ("test_capability[*local_blocks*", "output: * elements differ"),
    "slides_query_heads": ("test_capability[*homo_head_group*", "output: * elements differ"),
}


@pytest.mark.slow
def test_a_backend_that_serves_patterns_only_passes(tmp_path: Path) -> None:
    selected = ("--attn-backend=sparse", f"--attn-report={tmp_path / 'report'}")
    done = run(tmp_path, *selected, module="sparse.patterned", manifest=MANIFEST)

    assert done.returncode == 0, done.stdout
    (report,) = json.loads((tmp_path / "report" / "report.json").read_text("utf-8"))
    assert report["fraction"] == 1
    patterns = [one["value"] for one in report["served"] if one["field"] == "block_sparse"]
    assert any(pattern.get("homo_head_group") for pattern in patterns)
    read = parse_evidence({**report, "distribution": "attnplug-sparse 1.0"}).served  # as selection does
    assert {value for field, value in read if field == "block_sparse"} == set(map(hashable, patterns))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    manifest = MANIFEST.read_text("utf-8").replace('name = "sparse"', 'name = "{}"')
    return test_mutants.run(tmp_path_factory.mktemp("sparse"), MUTANTS, "--attn-device=cpu", manifest=manifest)


@pytest.mark.slow
@pytest.mark.unmeasured
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_pattern_is_found(mutant: str, reports: dict[str, list[dict[str, str]]]) -> None:
    test_mutants.require_failure(MUTANTS[mutant], reports[mutant])


PATTERN = {"max_seqlen": 64, "block_size": 2, "local_blocks": 1, "vert_stride": 4}


@pytest.mark.parametrize(
    ("head", "mode", "blocks"),
    [
        (0, {}, [3, 5]),
        (1, {}, [2, 5]),
        (3, {}, [0, 4, 5]),
        (3, {"homo_head": True}, [3, 5]),
        (1, {"homo_head_group": True}, [3, 5]),
        (2, {"homo_head_group": True}, [1, 5]),
    ],
)
def test_the_blocks_of_a_head(head: int, mode: dict[str, bool], blocks: list[int]) -> None:
    """Block 5 is the query's own; the others are where (block + slide + 1) is a multiple of 4."""
    keys = torch.arange(12)
    seen = seen_by(head, {**PATTERN, **mode}, num_q_heads=4, num_kv_heads=2, queries=keys[11:], keys=keys)

    assert seen[0].nonzero().flatten().tolist() == [2 * block + token for block in blocks for token in (0, 1)]


def test_a_row_that_attends_to_nothing_has_no_lse() -> None:
    rows = torch.ones(2, 1, 4)
    found = attend(rows, rows, rows, scale=1.0, block_sparse={**PATTERN, "local_blocks": 0})

    assert not found.output.any()
    assert (found.lse == -torch.inf).all()


def test_the_full_pattern_is_dense_attention() -> None:
    rows = torch.randn(50, 2, 4)
    sparse, dense = (attend(rows, rows, rows, scale=1.0, block_sparse=one) for one in (FULL_PATTERN, None))

    assert torch.equal(sparse.output, dense.output)


def test_other_names_are_not_known() -> None:
    assert has_known_parameters(FULL_PATTERN)
    assert not has_known_parameters({**FULL_PATTERN, "global_tokens": 3})
    assert not has_known_parameters({"block_size": 16})
