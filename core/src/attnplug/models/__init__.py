"""Model configurations as requirements, layer by layer. Neither transformers nor torch is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug._lazy import lazy

if TYPE_CHECKING:
    from attnplug.models.description import ModelDescription as ModelDescription
    from attnplug.models.description import OtherLayers as OtherLayers
    from attnplug.models.description import describe_model as describe_model
    from attnplug.models.description import model_layers as model_layers
    from attnplug.models.description import requirements as requirements
    from attnplug.models.description import requirements_from_json as requirements_from_json
    from attnplug.models.layers import ModelLayer as ModelLayer
    from attnplug.models.parallel import shard as shard

_MODULES: Final = {
    "attnplug.models.description": (
        "describe_model model_layers ModelDescription OtherLayers requirements requirements_from_json"
    ),
    "attnplug.models.layers": "ModelLayer",
    "attnplug.models.parallel": "shard",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
