"""
The smoke test of `make release-check`.

Generate with a small model of random weights, as the model does by itself.
"""

from __future__ import annotations

import torch
import transformers

from attnplug_transformers.engine import Engine


def smoke(need, _command):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config)
    model.eval()
    prompt = [3, 1, 4, 1, 5]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :].tolist()
    with Engine(model) as engine:
        found = engine.generate([prompt], max_new_tokens=4)
    need(list(found[0]) == expected, f"the engine generates {found}, the model {expected}")
