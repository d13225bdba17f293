"""The section `dense`: the dense op beside torch's own function."""

from __future__ import annotations

import pytest
import torch

import attnplug
from attnplug.errors import AttnplugError
from attnplug_kit.bench import dense
from attnplug_kit.bench.rig import Target


def test_the_call_and_its_op_are_measured_beside_torchs() -> None:
    found = dense.measure_here(1, Target(device="cpu"))

    assert [(one.name, one.unit) for one in found.measurements] == [("dense", "us")] * 4
    assert [one.budget for one in found.measurements] == [None, None, dense.BUDGET, None]
    assert not any(one.decides for one in found.measurements if one.budget is not None)


def test_a_wrong_result_has_no_time(monkeypatch) -> None:
    monkeypatch.setattr(attnplug, "attention", lambda query, *_, **__: torch.zeros_like(query))

    with pytest.raises(AttnplugError, match="another result"):
        dense.measure_here(1, Target(device="cpu"))
