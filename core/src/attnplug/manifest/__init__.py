"""Manifests: what one backend declares, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug._lazy import lazy

if TYPE_CHECKING:
    from attnplug.manifest.constraint import Alternative as Alternative
    from attnplug.manifest.constraint import Constraint as Constraint
    from attnplug.manifest.constraint import Exact as Exact
    from attnplug.manifest.constraint import Range as Range
    from attnplug.manifest.installed import check_requirement as check_requirement
    from attnplug.manifest.installed import requirement_name as requirement_name
    from attnplug.manifest.line_numbers import locate as locate
    from attnplug.manifest.reader import Reader as Reader
    from attnplug.manifest.reader import parse_manifest as parse_manifest
    from attnplug.manifest.reader import read_manifest as read_manifest
    from attnplug.manifest.schema import CONTRACT_API as CONTRACT_API
    from attnplug.manifest.schema import GROUP as GROUP
    from attnplug.manifest.schema import MANIFEST as MANIFEST
    from attnplug.manifest.schema import Condition as Condition
    from attnplug.manifest.schema import Holds as Holds
    from attnplug.manifest.schema import IsInstalled as IsInstalled
    from attnplug.manifest.schema import IsRequested as IsRequested
    from attnplug.manifest.schema import Manifest as Manifest
    from attnplug.manifest.schema import Option as Option
    from attnplug.manifest.schema import Preference as Preference
    from attnplug.manifest.schema import Rule as Rule
    from attnplug.manifest.schema import Variant as Variant
    from attnplug.manifest.schema import is_module as is_module
    from attnplug.manifest.supports import MUST_DECLARE as MUST_DECLARE
    from attnplug.manifest.supports import Declared as Declared
    from attnplug.manifest.supports import parse_conditions as parse_conditions

_MODULES: Final = {
    "attnplug.manifest.constraint": "Alternative Constraint Exact Range",
    "attnplug.manifest.installed": "check_requirement requirement_name",
    "attnplug.manifest.line_numbers": "locate",
    "attnplug.manifest.reader": "parse_manifest read_manifest Reader",
    "attnplug.manifest.schema": (
        "Condition CONTRACT_API GROUP Holds is_module IsRequested IsInstalled MANIFEST Manifest Option Preference "
        "Rule Variant"
    ),
    "attnplug.manifest.supports": "Declared MUST_DECLARE parse_conditions",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
