"""How the installed torch was built, read from its files: importing it takes seconds, and is not for this module."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attrs import frozen

_VERSION: Final = re.compile(r"^__version__\s*=\s*['\"]([^'\"]+)['\"]", re.MULTILINE)
_CUDA: Final = re.compile(r"^cuda\b[^=\n]*=\s*(?:None|['\"]([\d.]+))", re.MULTILINE)


@frozen
class TorchBuild:
    """
    A build of torch.

    Attributes:
        version: Its version, with the label of the build.
        cuda: The CUDA version that it was built for, or None: for the CPU or another vendor.
    """

    version: str
    cuda: str | None


def read() -> TorchBuild | None:
    """Return the build from torch's ``version.py``; None where there is none, or none that reads like one."""
    spec = find_spec("torch")
    file = Path(spec.origin).with_name("version.py") if spec is not None and spec.origin else None
    if file is None or not file.is_file():
        return None
    text = file.read_text(encoding="utf-8")
    version, cuda = _VERSION.search(text), _CUDA.search(text)
    return None if version is None or cuda is None else TorchBuild(version[1], cuda[1])
