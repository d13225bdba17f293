"""
The smoke test of `make release-check`.

Give a model like ComfyUI's the attention of attnplug, and write the folder of the nodes.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import attnplug_comfyui


def smoke(need, _command):
    class Model:
        def __init__(self):
            self.model_options = {"transformer_options": {}}

        def clone(self):
            return Model()

    torch.manual_seed(0)
    query = torch.randn(1, 10, 4 * 64)
    heads = query.view(1, 10, 4, 64).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
    model = attnplug_comfyui.patch(Model())
    found = attnplug_comfyui.override_of(model)(torch.add, query, query, query, 4)
    need(torch.allclose(found, expected, atol=1e-5), "attention differs on a backend")
    need(any(route.backend for route in attnplug_comfyui.report(model)), "no call went to a backend")
    with TemporaryDirectory() as folder:
        (Path(folder) / "custom_nodes").mkdir()
        need((attnplug_comfyui.install(folder) / "__init__.py").exists(), "the folder of the nodes is not written")
