"""What a host requests: requirements, devices and settings, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug._lazy import lazy

if TYPE_CHECKING:
    from attnplug.errors import near as near
    from attnplug.request.capability import ComputeCapability as ComputeCapability
    from attnplug.request.device import Device as Device
    from attnplug.request.domains import GRAPH_LEVELS as GRAPH_LEVELS
    from attnplug.request.domains import Flag as Flag
    from attnplug.request.domains import Integer as Integer
    from attnplug.request.domains import Level as Level
    from attnplug.request.domains import Name as Name
    from attnplug.request.domains import Names as Names
    from attnplug.request.domains import Number as Number
    from attnplug.request.domains import Table as Table
    from attnplug.request.domains import Text as Text
    from attnplug.request.domains import Word as Word
    from attnplug.request.field import Field as Field
    from attnplug.request.fields import FIELDS as FIELDS
    from attnplug.request.fields import fields_of as fields_of
    from attnplug.request.requirements import Requirements as Requirements
    from attnplug.request.settings import PAIR as PAIR
    from attnplug.request.settings import PREFIX as PREFIX
    from attnplug.request.settings import BackendNames as BackendNames
    from attnplug.request.settings import Options as Options
    from attnplug.request.settings import Settings as Settings
    from attnplug.request.settings import names_of_pair as names_of_pair
    from attnplug.request.settings import parse_toml as parse_toml
    from attnplug.request.settings import profile_folder as profile_folder

_MODULES: Final = {
    "attnplug.errors": "near",
    "attnplug.request.capability": "ComputeCapability",
    "attnplug.request.device": "Device",
    "attnplug.request.domains": "Flag GRAPH_LEVELS Integer Level Name Names Number Table Text Word",
    "attnplug.request.field": "Field",
    "attnplug.request.fields": "FIELDS fields_of",
    "attnplug.request.requirements": "Requirements",
    "attnplug.request.settings": "BackendNames names_of_pair Options PAIR parse_toml PREFIX profile_folder Settings",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
