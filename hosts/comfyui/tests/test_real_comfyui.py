"""
The override in a real ComfyUI. `COMFYUI_CHECKOUT` names its folder; several are separated as in PATH.

The interpreter needs what ComfyUI itself imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hosts.comfyui.tests.signatures import VERSIONS

PROGRAM = Path(__file__).with_name("real_comfyui.py")
CHECKOUTS = [one for one in os.environ.get("COMFYUI_CHECKOUT", "").split(os.pathsep) if one]
NEWEST = list(VERSIONS)[-1]


@pytest.fixture(scope="module", params=CHECKOUTS or [None])
def found(request):
    """Return what the program found in a checkout."""
    if request.param is None:
        pytest.skip("needs a checkout of ComfyUI: name its folder in COMFYUI_CHECKOUT")
    path = os.pathsep.join([request.param, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, PROGRAM],
        cwd=request.param,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.rpartition("FOUND ")[2])


def test_the_signatures_are_those_that_are_published(found) -> None:
    published = VERSIONS.get(found["version"], VERSIONS[NEWEST]).functions
    for name, parameters in found["signatures"].items():
        known = published[name.removeprefix("attention").removeprefix("_")]
        assert [(one, ... if required else default) for one, required, default in parameters] == list(known)
    assert {name.removeprefix("attention").removeprefix("_") for name in found["signatures"]} == published.keys()


def test_each_function_has_its_result(found) -> None:
    differences, counted = found["functions"]["differences"], found["functions"]["counted"]

    assert {f"attention_{name}" for name in differences} == counted.keys()
    assert {"pytorch", "sub_quad", "split"} <= differences.keys()
    assert max(differences.values()) < 1e-5
    assert set(counted.values()) == {16}


def test_boolean_masks_have_the_result_of_pytorch(found) -> None:
    assert found["booleans"] < 1e-5


def test_scores_of_halves_are_those_in_float32(found) -> None:
    assert found["precision"] < 2e-3


def test_keywords_of_newer_versions_have_their_result(found) -> None:
    has_containers = VERSIONS.get(found["version"], VERSIONS[NEWEST]).has_containers

    assert (found["keywords"] is not None) is has_containers
    assert not has_containers or found["keywords"] < 1e-5


def test_models_run_beside_each_other_with_their_options(found) -> None:
    models = found["models"]
    backends = {name: {backend for _, backend, _ in one["routes"]} for name, one in models.items()}
    calls = {name: sum(count for *_, count in one["routes"]) for name, one in models.items()}

    assert backends == {"flux": {"torch/sdpa"}, "wan": {"torch/sdpa"}, "unet": {None}}
    assert calls == {"flux": 4, "wan": 4, "unet": 14}
    assert all(replaced == found["optimized"] for one in models.values() for replaced, *_ in one["routes"])
    assert max(one["difference"] for one in models.values()) < 1e-5


def test_the_setter_of_comfyui_has_the_same_key(found) -> None:
    has_setter = VERSIONS.get(found["version"], VERSIONS[NEWEST]).has_setter

    assert found["setter"] == (["optimized_attention_override"] if has_setter else None)
