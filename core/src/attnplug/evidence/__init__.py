"""Evidence: what runs of the conformance kit have shown of a candidate, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug._lazy import lazy

if TYPE_CHECKING:
    from attnplug.evidence.coverage import Evidence as Evidence
    from attnplug.evidence.coverage import hashable as hashable
    from attnplug.evidence.store import FOLDER as FOLDER
    from attnplug.evidence.store import EvidenceFolder as EvidenceFolder
    from attnplug.evidence.store import read_folder as read_folder

_MODULES: Final = {
    "attnplug.evidence.coverage": "Evidence hashable",
    "attnplug.evidence.store": "FOLDER EvidenceFolder read_folder",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
