"""Evidence, as data: what runs of the conformance kit have shown of a candidate, and what `attnplug tune` measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug._lazy import lazy

if TYPE_CHECKING:
    from attnplug.evidence.coverage import Evidence as Evidence
    from attnplug.evidence.coverage import hashable as hashable
    from attnplug.evidence.profile import PHASES as PHASES
    from attnplug.evidence.profile import MeasuredTime as MeasuredTime
    from attnplug.evidence.profile import ProfileEntry as ProfileEntry
    from attnplug.evidence.profile import bucket_of as bucket_of
    from attnplug.evidence.profile import content_hash as content_hash
    from attnplug.evidence.profile import dump_entries as dump_entries
    from attnplug.evidence.profile import entry_name as entry_name
    from attnplug.evidence.profile import merged as merged
    from attnplug.evidence.profile import parse_entries as parse_entries
    from attnplug.evidence.store import FOLDER as FOLDER
    from attnplug.evidence.store import EvidenceFolder as EvidenceFolder
    from attnplug.evidence.store import read_folder as read_folder
    from attnplug.evidence.times import current_versions as current_versions
    from attnplug.evidence.times import levelled as levelled
    from attnplug.evidence.times import phase_scores as phase_scores
    from attnplug.evidence.times import relative_times as relative_times
    from attnplug.evidence.times import total_scores as total_scores

_MODULES: Final = {
    "attnplug.evidence.coverage": "Evidence hashable",
    "attnplug.evidence.profile": (
        "bucket_of content_hash dump_entries entry_name MeasuredTime merged parse_entries PHASES ProfileEntry"
    ),
    "attnplug.evidence.store": "FOLDER EvidenceFolder read_folder",
    "attnplug.evidence.times": "current_versions levelled phase_scores relative_times total_scores",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
