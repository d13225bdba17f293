"""The table of forgotten features has every cell, and the kit catches a feature of each kind again."""

from __future__ import annotations

import json
import os

import pytest

from kit.tests.conformance import forgotten
from tools import forked

AGAIN = (
    "scale_in_wide_prefill",
    "window_in_graph",
    "chunk_in_many",
    "cap_in_many",
    "alibi_in_many",
    "sinks_in_advanced",
    "k_scale_in_hnd",
    "v_scale_in_written",
)
"""A cell for each feature; those of many requests were caught by no test once."""


def test_the_table_has_every_cell() -> None:
    data = json.loads(forgotten.DATA.read_text("utf-8"))

    assert set(data["cells"]) == set(forgotten.CELLS), "run `python -m kit.tests.conformance.forgotten`, and commit it"
    assert forgotten.PAGE.read_text("utf-8") == forgotten.page(data)
    assert [name for name, one in data["cells"].items() if one["test"] == ""] == []


def test_what_is_not_served_has_no_result() -> None:
    data = json.loads(forgotten.DATA.read_text("utf-8"))

    assert {name for name, one in data["cells"].items() if one["test"] is None} == {
        name for name in forgotten.CELLS if not forgotten.is_served(name)
    }


@pytest.mark.slow
def test_a_forgotten_feature_is_found() -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    path = os.pathsep.join(filter(None, (str(forgotten.ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**outside, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    done = forked.run("-m", forgotten.__name__, "--check", *AGAIN, env=environment, cwd=forgotten.ROOT)

    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == list(AGAIN)
