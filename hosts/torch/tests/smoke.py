"""
The smoke test of `make release-check`.

Route a call of torch's own attention to a backend, and find the same numbers.
"""

from __future__ import annotations

import torch

import attnplug_torch


def smoke(need, _command):
    torch.manual_seed(0)
    query = torch.randn(1, 4, 10, 64)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query, query, query, is_causal=True)
    attnplug_torch.register()
    torch.nn.attention.activate_flash_attention_impl("attnplug")
    found = attend(query, query, query, is_causal=True)
    torch.nn.attention.restore_flash_attention_impl()
    need(torch.allclose(found, expected, atol=1e-5), "torch's attention differs on a backend")
    need(any(route.backend for route in attnplug_torch.report()), "no call went to a backend")
