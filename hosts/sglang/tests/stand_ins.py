"""
What stands in for libraries that SGLang imports and that have no build here.

- torchvision registers descriptions of its compiled operators, which need the CUDA build of torch that it was made for:
  without them it imports, and nothing here calls them.
- vLLM's ``rotary_embedding``, which SGLang calls on devices for which it has no kernel itself.
- torchaudio, which only models of sound call.
- a kernel of sparse attention, which SGLang 0.5.15 imports with DeepSeek's models, and which imports CUTLASS.

Processes that an engine starts import the main module again, and with it what it has installed.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_REGISTER = torch.library.register_fake


def _register_fake(op: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    if isinstance(op, str) and op.startswith("torchvision::"):
        return lambda function: function
    return _REGISTER(op, *args, **kwargs)  # type: ignore[return-value]


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate queries and keys in place; the halves of a head are pairs."""
    assert is_neox, "pairs of neighbors are not stood in for"
    cos, sin = cos_sin_cache[positions].unsqueeze(1).float().chunk(2, -1)
    half = cos.shape[-1]
    for rows in (query, key):
        heads = rows.view(len(positions), -1, head_size)
        first, second = heads[..., :half].float(), heads[..., half : 2 * half].float()
        heads[..., : 2 * half] = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(rows.dtype)


def _module(name: str, **members: Any) -> None:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package="." not in name)
    module.__path__ = []
    for member, value in members.items():
        setattr(module, member, value)
    sys.modules.setdefault(name, module)


def install() -> None:
    """Let torchvision import; the second call changes nothing."""
    torch.library.register_fake = _register_fake


def install_for_engines() -> None:
    """Stand in for what whole engines call besides."""
    install()
    _module("vllm")
    _module("vllm._custom_ops", rotary_embedding=rotary_embedding)
    sys.modules["vllm"]._custom_ops = sys.modules["vllm._custom_ops"]  # type: ignore[attr-defined]
    _module("torchaudio", __version__="0")
    install_for_latents()


def install_for_latents() -> None:
    """Stand in for what models with latent attention import besides, on a GPU too."""
    if find_spec("cutlass") is None:
        absent = dict.fromkeys(("CuteDSLPagedMQALogitsRunner", "pick_dsl_expand"))
        _module("sglang.jit_kernel.dsa.cutedsl_paged_mqa_logits", **absent)
