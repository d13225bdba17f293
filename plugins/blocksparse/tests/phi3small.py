"""Models of Phi-3-small's shape, with random weights, and their reference by dense attention with masks."""

from __future__ import annotations

from typing import Any, Final

import torch
import transformers

from attnplug_kit.oracle import seen_by

VOCABULARY: Final = 512
SMALL: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "blocksparse_block_size": 16,
    "blocksparse_num_local_blocks": 1,
    "blocksparse_vert_stride": 4,
}
LARGE: Final[dict[str, Any]] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "blocksparse_block_size": 64,
    "blocksparse_num_local_blocks": 16,
    "blocksparse_vert_stride": 8,
}


class Phi3SmallConfig(transformers.LlamaConfig):
    """Llama's configuration with the fields of Phi-3-small's attention."""

    model_type = "phi3small"


class Phi3SmallForCausalLM(transformers.LlamaForCausalLM):
    """Llama with block-sparse attention in every second layer, applied by the backend or by `mask_densely`."""

    config_class = Phi3SmallConfig


def build(sizes: dict[str, Any], *, device: str, positions: int = 1024, layers: int = 4, seed: int = 0) -> Any:
    """Return a model in bfloat16 whose tokens depend on attention, neither uniform nor on one key."""
    configuration = Phi3SmallConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=positions,
        num_hidden_layers=layers,
        dense_attention_every_n_layers=2,
        blocksparse_homo_head_pattern=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
        attn_implementation="eager",
        **sizes,
    )
    with torch.device(device):
        model = Phi3SmallForCausalLM(configuration)
    source = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                gain = 1.2 if "q_proj" in name or "k_proj" in name else 0.5 if "mlp" in name else 1.0
                noise = torch.randn(weight.shape, generator=source, device=device)
                weight.copy_(noise * gain * weight.shape[-1] ** -0.5)
    return model.to(torch.bfloat16).eval()


def mask_densely(model: Any) -> None:
    """Add the patterns to transformers' own attention as masks, ``(1, heads, queries, keys)``."""
    configuration = model.config
    pattern = {
        "block_size": configuration.blocksparse_block_size,
        "local_blocks": configuration.blocksparse_num_local_blocks,
        "vert_stride": configuration.blocksparse_vert_stride,
    }
    heads = {"num_q_heads": configuration.num_attention_heads, "num_kv_heads": configuration.num_key_value_heads}

    def masked(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        positions = torch.arange(hidden.shape[1])
        visible = torch.stack(
            [seen_by(head, pattern, **heads, queries=positions, keys=positions) for head in range(heads["num_q_heads"])]
        )
        visible &= positions[None, :] <= positions[:, None]
        mask = torch.zeros(visible.shape, dtype=hidden.dtype).masked_fill(~visible, torch.finfo(hidden.dtype).min)
        return args, {**kwargs, "attention_mask": mask[None].to(hidden.device)}

    for index, layer in enumerate(model.model.layers):
        if (index + 1) % 2:
            layer.self_attn.register_forward_pre_hook(masked, with_kwargs=True)


def prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    """Return random prompts of these lengths."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=source).tolist() for length in lengths]
