"""What a host requests: requirements, devices and settings, as plain data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug._lazy import lazy

if TYPE_CHECKING:
    from attnplug.request.device import ComputeCapability as ComputeCapability
    from attnplug.request.device import Device as Device
    from attnplug.request.fields import FIELDS as FIELDS
    from attnplug.request.fields import GRAPH_LEVELS as GRAPH_LEVELS
    from attnplug.request.fields import Field as Field
    from attnplug.request.fields import Flag as Flag
    from attnplug.request.fields import Integer as Integer
    from attnplug.request.fields import Level as Level
    from attnplug.request.fields import Name as Name
    from attnplug.request.fields import Names as Names
    from attnplug.request.fields import Number as Number
    from attnplug.request.fields import Table as Table
    from attnplug.request.fields import Text as Text
    from attnplug.request.fields import Word as Word
    from attnplug.request.fields import fields_of as fields_of
    from attnplug.request.fields import near as near
    from attnplug.request.requirements import Requirements as Requirements
    from attnplug.request.settings import PREFIX as PREFIX
    from attnplug.request.settings import BackendNames as BackendNames
    from attnplug.request.settings import Options as Options
    from attnplug.request.settings import Settings as Settings
    from attnplug.request.settings import parse_toml as parse_toml

_MODULES: Final = {
    "attnplug.request.device": "ComputeCapability Device",
    "attnplug.request.fields": (
        "Field FIELDS fields_of Flag GRAPH_LEVELS Integer Level Name Names near Number Table Text Word"
    ),
    "attnplug.request.requirements": "Requirements",
    "attnplug.request.settings": "BackendNames Options parse_toml PREFIX Settings",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
