"""The plugin where its kernels run: on a GPU, or on a CPU in Triton's interpreter."""

from __future__ import annotations

from tests.backends.triton_on_cpu import TritonPlugin

PLUGIN = TritonPlugin(
    name="triton",
    package="attnplug_triton",
    distribution="attnplug-triton",
    changes=(
        (r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),
        (r'^compute_capability = \{ min = "7.5" \}', ""),
        (r'^need = \{ compute_capability = \{ min = "8.0" \} \}', "need = { paged = true }"),
    ),
)

registered = PLUGIN.fixture()


def pytest_configure():
    PLUGIN.configure()
