"""
The folder that ComfyUI loads: copy or link it as ``ComfyUI/custom_nodes/attnplug``.

``python -m attnplug_comfyui path/to/ComfyUI`` does so. The distribution attnplug-comfyui has to be installed in the
environment of ComfyUI.
"""

from __future__ import annotations

from attnplug_comfyui.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
