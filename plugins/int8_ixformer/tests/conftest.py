"""
The plugin where its kernels run: on a GPU, or on a CPU in Triton's interpreter; and on a fake of ixformer.

A test or class that uses the fixture `fakes` sees the fake of ixformer, when it is collected and when it runs.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from tests.backends.fakes import FakeLibraries
from tests.backends.triton_on_cpu import TritonPlugin

PLUGIN = TritonPlugin(
    name="int8_ixformer",
    package="attnplug_int8_ixformer",
    distribution="attnplug-int8-ixformer",
    changes=((r'device_type = "cuda", compute_capability = \{ min = "8\.0" \}', 'device_type = ["cuda", "cpu"]'),),
)
FEW_HEAD_SIZES = (r"^head_size = .*$", "head_size = [64, 80]")  # the interpreted kit; on a GPU it runs all sizes

FAKE = "int8_ixformer_fake"
VERSIONS = {"ixformer": "1.0"}
IS_REAL_HERE = find_spec("ixformer") is not None
FAKES = FakeLibraries(
    package="attnplug_int8_ixformer",
    name=FAKE,
    folder=Path(__file__).with_name("fakes"),
    packages=("ixformer",),
    changes=(
        (r'name = "int8_ixformer"', f'name = "{FAKE}"'),
        (r'device_type = "cuda", vendor = "iluvatar", compute_capability = \{ min = "1\.0" \}', 'device_type = "cpu"'),
    ),
    skip_reason="ixformer is installed, and its fake would replace it" if IS_REAL_HERE else None,
    prepare=lambda versions: None,
)

collect_ignore = ["test_conformance.py"] if IS_REAL_HERE else []  # the fake must be active during its collection

registered = PLUGIN.fixture()
pytest_generate_tests = FAKES.collection_hook(VERSIONS)
fakes = FAKES.fixture(VERSIONS, "ixformer.journal")


def pytest_unconfigure():
    FAKES.close()


def pytest_configure(config):
    is_kit = any("conformance" in argument for argument in config.args)
    PLUGIN.configure(*([FEW_HEAD_SIZES] if is_kit else []))
