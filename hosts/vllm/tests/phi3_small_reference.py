"""Tiny Phi-3-small checkpoints, and what they compute, in plain torch: nothing of vLLM or attnplug is used here."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

TINY: Final[dict[str, Any]] = {
    "model_type": "phi3small",
    "architectures": ["Phi3SmallForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 256,
    "ff_intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "hidden_act": "gegelu",
    "gegelu_limit": 1.5,
    "layer_norm_epsilon": 1e-5,
    "rope_embedding_base": 10000.0,
    "rope_position_scale": 1.0,
    "mup_use_scaling": True,
    "mup_attn_multiplier": 2.0,
    "mup_embedding_multiplier": 3.0,
    "mup_width_multiplier": 2.0,
    "dense_attention_every_n_layers": 2,
    "blocksparse_block_size": 16,
    "blocksparse_num_local_blocks": 1,
    "blocksparse_vert_stride": 4,
    "blocksparse_homo_head_pattern": False,
    "tie_word_embeddings": False,
    "dummy_token_indices": [0, 7],
    "bos_token_id": None,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, seed: int = 0, **changes: Any) -> dict[str, Any]:
    """Write config.json and random weights by the published names; return the configuration."""
    config = TINY | changes
    source = torch.Generator().manual_seed(seed)

    def rows(count: int, width: int | None = None, gain: float = 1.0) -> torch.Tensor:
        shape = (count,) if width is None else (count, width)
        return torch.randn(shape, generator=source) * gain * (1 if width is None else width**-0.5)

    hidden, feed = config["hidden_size"], config["ff_intermediate_size"]
    size = hidden // config["num_attention_heads"]
    fused = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * size
    weights = {"model.embed_tokens.weight": rows(config["vocab_size"], hidden, hidden**0.5 / 3)}
    for layer in range(config["num_hidden_layers"]):
        for name, height, width, gain in (
            ("self_attn.query_key_value", fused, hidden, 3.0),
            ("self_attn.dense", hidden, hidden, 1.0),
            ("mlp.up_proj", 2 * feed, hidden, 2.0),
            ("mlp.down_proj", hidden, feed, 0.5),
        ):
            weights[f"model.layers.{layer}.{name}.weight"] = rows(height, width, gain)
            weights[f"model.layers.{layer}.{name}.bias"] = rows(height, gain=0.1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = 1 + rows(hidden, gain=0.1)
            weights[f"model.layers.{layer}.{norm}.bias"] = rows(hidden, gain=0.1)
        weights[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(size // 2)  # old ones have it
    weights["model.final_layernorm.weight"] = 1 + rows(hidden, gain=0.1)
    weights["model.final_layernorm.bias"] = rows(hidden, gain=0.1)
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = rows(config["vocab_size"], hidden)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, config["torch_dtype"])
    save_file({name: weight.to(dtype) for name, weight in weights.items()}, folder / "model.safetensors")
    # The published configuration leaves out what is true.
    written = {name: value for name, value in config.items() if name != "tie_word_embeddings" or not value}
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    return config


def prompts_of(*lengths: int, seed: int = 5) -> list[list[int]]:
    """Return random prompts of these lengths."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(8, TINY["vocab_size"], (length,), generator=source).tolist() for length in lengths]


def compare(
    config: dict[str, Any], folder: Path, prompts: list[list[int]], outputs: list[dict[str, Any]]
) -> tuple[int, float]:
    """Return how many greedy tokens differ, each after the engine's own, and the largest difference of a logprob."""
    weights, differing, worst = load_file(folder / "model.safetensors"), 0, 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output["tokens"]
        expected = logits_of(config, weights, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        differing += int((expected.argmax(-1) != torch.tensor(tokens)).sum())
        chosen = expected[range(len(tokens)), tokens]
        worst = max(worst, float((chosen - torch.tensor(output["logprobs"])).abs().max()))
    return differing, worst


def logits_of(config: dict[str, Any], weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """Return the logits ``(len(tokens), vocab_size)`` in float32, by loops where these are plainest."""
    weights = {name.removeprefix("model."): weight.float() for name, weight in weights.items()}

    def linear(name: str, rows: torch.Tensor) -> torch.Tensor:
        return rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, rows: torch.Tensor) -> torch.Tensor:
        centered = rows - rows.mean(-1, keepdim=True)
        scaled = centered / (centered.square().mean(-1, keepdim=True) + config["layer_norm_epsilon"]).sqrt()
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    hidden = weights["embed_tokens.weight"][tokens] * config["mup_embedding_multiplier"]
    for layer in range(config["num_hidden_layers"]):
        name = f"layers.{layer}"
        fused = linear(f"{name}.self_attn.query_key_value", norm(f"{name}.input_layernorm", hidden))
        hidden = hidden + linear(f"{name}.self_attn.dense", _attention(config, fused, layer))
        up = linear(f"{name}.mlp.up_proj", norm(f"{name}.post_attention_layernorm", hidden))
        limit = config["gegelu_limit"]
        gate, straight = up[:, 0::2].clamp(max=limit), up[:, 1::2].clamp(-limit, limit)
        hidden = hidden + linear(f"{name}.mlp.down_proj", gate / (1 + (-1.702 * gate).exp()) * (1 + straight))
    head = weights["embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    logits = norm("final_layernorm", hidden) @ head.T / config["mup_width_multiplier"]
    logits[:, config["dummy_token_indices"]] = -torch.inf
    return logits


def _attention(config: dict[str, Any], fused: torch.Tensor, layer: int) -> torch.Tensor:
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    size, per_group = config["hidden_size"] // heads, heads // groups
    scale = config["mup_attn_multiplier"] / size if config["mup_use_scaling"] else size**-0.5
    found = []
    for head in range(heads):
        group, within = divmod(head, per_group)
        start = group * (per_group + 2) * size  # a group's rows: its queries, its key, its value
        query = _rotated(config, fused[:, start + within * size :][:, :size])
        key = _rotated(config, fused[:, start + per_group * size :][:, :size])
        value = fused[:, start + (per_group + 1) * size :][:, :size]
        scores = (query @ key.T * scale).masked_fill(~_visible(config, head, len(fused), layer), -torch.inf)
        found.append(scores.softmax(-1) @ value)
    return torch.cat(found, -1)


def _rotated(config: dict[str, Any], rows: torch.Tensor) -> torch.Tensor:
    half = rows.shape[1] // 2
    speeds = config["rope_embedding_base"] ** -(torch.arange(half) / half)
    angles = torch.arange(len(rows)).unsqueeze(1) / config["rope_position_scale"] * speeds
    left, right = rows[:, :half], rows[:, half:]
    return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)


def _visible(config: dict[str, Any], head: int, count: int, layer: int) -> torch.Tensor:
    """Which keys each query attends to, ``(count, count)``: the formula of the published model, token by token."""
    every, size = config["dense_attention_every_n_layers"], config["blocksparse_block_size"]
    dense = bool(every) and (layer + 1) % every == 0
    stride = config["blocksparse_vert_stride"]
    step = 0 if config["blocksparse_homo_head_pattern"] else max(1, int(stride / config["num_attention_heads"]))
    found = torch.zeros(count, count, dtype=torch.bool)
    for query in range(count):
        for key in range(query + 1):
            near = query // size - key // size < config["blocksparse_num_local_blocks"]
            found[query, key] = dense or near or (key // size + head * step + 1) % stride == 0
    return found
