"""The plugin where its kernels run: on a GPU, or on a CPU in Triton's interpreter."""

from __future__ import annotations

from tests.backends.triton_on_cpu import TritonPlugin

PLUGIN = TritonPlugin(
    name="triton",
    package="attnplug_triton",
    distribution="attnplug-triton",
    changes=((r'^device_type = "cuda"\ncompute_capability = .*$', 'device_type = ["cuda", "cpu"]'),),
)

registered = PLUGIN.fixture()


def pytest_configure():
    PLUGIN.configure()
