"""The smoke test of `make release-check`. Bind a model of diffusers, and find the same numbers."""

from __future__ import annotations

import diffusers
import torch

import attnplug_diffusers


def smoke(need, _command):
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=1, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "timestep": torch.tensor([1]),
    }
    with torch.no_grad():
        expected = model(**inputs).sample
        with attnplug_diffusers.bind(model) as binding:
            found = model(**inputs).sample
    need(torch.allclose(found, expected, atol=1e-5), "the model differs on a backend")
    need(len(binding.modules) == 2, f"what is bound is {binding.modules}")
