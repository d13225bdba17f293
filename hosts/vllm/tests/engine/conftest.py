"""The process that runs engines, and the tiny models, for the tests on a CPU and on a GPU."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def server():
    """The process that runs the engines."""
    from hosts.vllm.tests.engine import harness  # noqa: PLC0415 - it needs what comes with vLLM

    server = harness.EngineServer()
    yield server
    server.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Return a function that returns the folder of a model."""
    from hosts.vllm.tests.engine import models  # noqa: PLC0415 - likewise

    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            models.save(name, made[name])
        return made[name]

    return get
