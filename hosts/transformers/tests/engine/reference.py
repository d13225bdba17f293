"""Tiny models with prompts, and the tokens that transformers alone generates."""

from __future__ import annotations

from functools import lru_cache

import torch

from hosts.transformers.tests.models import PAD, generate, model

NEW = 14
NAMES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3")


@lru_cache
def reference(name, new_tokens=NEW):
    """Return a model, prompts, and the tokens that follow each, all with a wide logit margin."""
    for seed in range(16):
        torch.manual_seed(seed)  # the biases of experts are random
        made, prompts = model(name, seed=seed), _prompts(seed)
        longest = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
        found, margin = generate(made, ids, (ids != PAD).long(), new_tokens)
        if margin > 3e-4:
            break
    assert margin > 3e-4
    return made, prompts, found.tolist()


def _prompts(seed):
    """Prompts of different lengths; some share a prefix, and one continues another."""
    source = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(0, PAD, (length,), generator=source).tolist() for length in (19, 1, 12, 33, 7, 22)]
    return [*drawn, drawn[0], drawn[3][:24] + drawn[2], drawn[5] + drawn[4]]
