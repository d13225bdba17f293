"""The double in place of ixformer, and the plugin registered beside it as a backend that a CPU may run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.backends.fakes import FakeLibraries

NAME: Final = "int8_ixformer_double"
VERSIONS: Final = {"ixformer": "1.0"}
IS_REAL_HERE: Final = find_spec("ixformer") is not None

FAKES: Final = FakeLibraries(
    package="attnplug_int8_ixformer",
    name=NAME,
    folder=Path(__file__).with_name("double"),
    packages=("ixformer",),
    changes=(
        (r'name = "int8_ixformer"', f'name = "{NAME}"'),
        (r'device_type = "cuda", vendor = \[[^]]*\], compute_capability = \{ min = "1\.0" \}', 'device_type = "cpu"'),
    ),
    skip_reason="ixformer is installed here, and its double would be mistaken for it" if IS_REAL_HERE else None,
    prepare=lambda versions: None,
)
