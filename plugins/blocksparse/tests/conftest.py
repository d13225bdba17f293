"""The plugin where its kernels run: on a GPU, or on a CPU in Triton's interpreter."""

from __future__ import annotations

from tests.backends.triton_on_cpu import TritonPlugin

PLUGIN = TritonPlugin(
    name="blocksparse",
    package="attnplug_blocksparse",
    distribution="attnplug-blocksparse",
    changes=(
        (r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),
        (r"^compute_capability = .*$", ""),
        (r'^need = \{ compute_capability = \{ min = "8.9" \} \}', "need = { block_sparse = true }"),
    ),
)

registered = PLUGIN.fixture()


def pytest_configure():
    PLUGIN.configure()
