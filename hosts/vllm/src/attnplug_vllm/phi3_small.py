"""
Phi-3-small for vLLM, which dropped its own model after 0.9.2, with block-sparse attention by attnplug.

Names of weights, of fields and the formulas are those of the published checkpoints
(microsoft/Phi-3-small-8k-instruct). Most layers attend by a block-sparse pattern; every
`dense_attention_every_n_layers`-th attends to everything. The pattern goes to the layer's implementation as the keyword
``block_sparse``, as `attnplug.Requirements.block_sparse` describes it.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from vllm.compilation.decorators import support_torch_compile
from vllm.distributed import get_pp_group, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import (
    is_pp_missing_parameter,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
)
from vllm.sequence import IntermediateTensors
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attnplug.errors import RequirementsError
from attnplug.models import model_layers
from attnplug_vllm import names

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from vllm.config import VllmConfig

QKV: Final = ".query_key_value."
UP: Final = ".up_proj."
DYNAMIC: Final = dict.fromkeys(("input_ids", "positions", "intermediate_tensors", "inputs_embeds"), 0)
"""The dimension of each argument that differs between steps: vLLM does not read it from postponed annotations."""


def gegelu(gate: torch.Tensor, linear: torch.Tensor, limit: float | None) -> torch.Tensor:
    """
    Return ``gate * sigmoid(1.702 * gate) * (linear + 1)``, both inputs limited.

    Infinite inputs stay infinite, as in the published code: the limit bounds finite activations only.

    Args:
        gate: ``(..., width)``; limited from above.
        linear: ``(..., width)``; limited on both sides.
        limit: The limit, or None for no limit.
    """
    if limit is not None:
        gate = torch.where(gate.isinf(), gate, gate.clamp(max=limit))
        linear = torch.where(linear.isinf(), linear, linear.clamp(min=-limit, max=limit))
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


def rope_parameters(config: Any) -> dict[str, Any]:
    """Return the parameters of `get_rope`: the checkpoint's base and its scaling, of all positions or LongRoPE."""
    found = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    if found["rope_type"] == "su":
        found["rope_type"] = "longrope"
    factor = getattr(config, "rope_position_scale", 1.0)
    if found["rope_type"] == "default" and factor != 1.0:
        found |= {"rope_type": "linear", "factor": factor}
    return {**found, "rope_theta": config.rope_embedding_base}


def patterns(config: Any) -> list[dict[str, Any] | None]:
    """Return the block-sparse pattern of each layer, or None for a dense one."""
    # Heads, dtype and cache are vLLM's to say; only the pattern is read here.
    layers = model_layers(config, dtype="bfloat16", paged=True)
    found = [layer.requirements.block_sparse for layer in layers]
    return [None if pattern is None else dict(pattern) for pattern in found]


def split_fused(name: str, weight: torch.Tensor, config: Any) -> Iterator[tuple[torch.Tensor, str | int]]:
    """
    Yield the parts of a fused weight or bias, each with its shard of vLLM's fused layer.

    The checkpoint interleaves: for each KV head the rows of its query heads, its key and its value; in the feed-forward
    layer a row of the gate and a row of the linear part. vLLM stacks whole parts, which it shards over ranks.

    Raises:
        RequirementsError: The tensor is neither weight nor bias, such as packed integers, which have other rows.
    """
    if not name.endswith((".weight", ".bias")):
        raise RequirementsError(
            f"the checkpoint has {name!r} for Phi-3-small",
            "query_key_value and up_proj are interleaved, and are split from weights and biases of one row per output",
            "load an unquantized checkpoint; vLLM quantizes it with --quantization fp8",
        )
    if UP in name:
        yield from ((weight[0::2], 0), (weight[1::2], 1))
        return
    groups, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    rows = weight.reshape(groups, config.num_attention_heads // groups + 2, size, *weight.shape[1:])
    for part, shard in ((rows[:, :-2], "q"), (rows[:, -2], "k"), (rows[:, -1], "v")):
        yield part.reshape(-1, *weight.shape[1:]), shard


class Phi3SmallMLP(nn.Module):
    """The feed-forward layer."""

    def __init__(self, config: Any, quant_config: Any, prefix: str) -> None:
        super().__init__()
        if config.hidden_act != "gegelu":
            raise RequirementsError(
                f"the configuration has hidden_act={config.hidden_act!r}",
                "Phi-3-small computes 'gegelu'",
                "correct config.json, or run the model from the code that it is published with",
            )
        self.limit = config.gegelu_limit
        width, more = config.intermediate_size, {"bias": True, "quant_config": quant_config}
        self.up_proj = MergedColumnParallelLinear(
            config.hidden_size, [width, width], prefix=f"{prefix}.up_proj", **more
        )
        self.down_proj = RowParallelLinear(width, config.hidden_size, prefix=f"{prefix}.down_proj", **more)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, ``(num_tokens, hidden_size)``."""
        gate, linear = self.up_proj(hidden)[0].chunk(2, dim=-1)
        return self.down_proj(gegelu(gate, linear, self.limit))[0]  # type: ignore[no-any-return]  # vLLM is untyped here


class Phi3SmallAttention(nn.Module):
    """The attention of one layer, block-sparse or dense."""

    def __init__(self, config: Any, pattern: dict[str, Any] | None, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        ranks, quant = get_tensor_model_parallel_world_size(), vllm_config.quant_config
        heads = config.num_attention_heads
        size = config.hidden_size // heads
        self.query_key_value = QKVParallelLinear(
            config.hidden_size, size, heads, config.num_key_value_heads, bias=True, quant_config=quant,
            prefix=f"{prefix}.query_key_value",
        )  # fmt: skip
        self.dense = RowParallelLinear(
            config.hidden_size, config.hidden_size, bias=True, quant_config=quant, prefix=f"{prefix}.dense"
        )
        q_heads, kv_heads = heads // ranks, max(1, config.num_key_value_heads // ranks)
        self.sizes = [q_heads * size, kv_heads * size, kv_heads * size]
        self.rotary = get_rope(size, config.max_position_embeddings, rope_parameters=rope_parameters(config))
        # muP scales scores by the size of a head, not by its root.
        scale = config.mup_attn_multiplier / size if config.mup_use_scaling else size**-0.5
        sparse = {} if pattern is None else {"block_sparse": pattern}
        self.attn = Attention(
            q_heads, size, scale, num_kv_heads=kv_heads, cache_config=vllm_config.cache_config, quant_config=quant,
            prefix=f"{prefix}.attn", **sparse,
        )  # fmt: skip

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the layer's output, ``(num_tokens, hidden_size)``."""
        query, key, value = self.query_key_value(hidden)[0].split(self.sizes, dim=-1)
        query, key = self.rotary(positions, query, key)
        return self.dense(self.attn(query, key, value))[0]  # type: ignore[no-any-return]  # vLLM is untyped here


class Phi3SmallLayer(nn.Module):
    """Attention and feed-forward layer, each behind a norm and added to the residual."""

    def __init__(self, config: Any, pattern: dict[str, Any] | None, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        self.self_attn = Phi3SmallAttention(config, pattern, vllm_config, prefix=f"{prefix}.self_attn")
        self.mlp = Phi3SmallMLP(config, vllm_config.quant_config, prefix=f"{prefix}.mlp")
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the residual behind the layer, ``(num_tokens, hidden_size)``."""
        hidden = hidden + self.self_attn(positions, self.input_layernorm(hidden))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return] # torch: a module's call


@support_torch_compile(dynamic_arg_dims=DYNAMIC)
class Phi3SmallModel(nn.Module):
    """The decoder: embeddings, the layers of this pipeline rank, and the last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        found = patterns(config)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.embedding_multiplier = config.mup_embedding_multiplier or 0.0
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: Phi3SmallLayer(config, found[int(prefix.rpartition(".")[2])], vllm_config, prefix),
            prefix=f"{prefix}.layers",
        )
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_epsilon)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states"], config.hidden_size
        )

    def embed_input_ids(self, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Return the embeddings of tokens, not yet scaled."""
        return self.embed_tokens(input_ids)  # type: ignore[no-any-return] # torch: a module's call

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Return the hidden states, ``(num_tokens, hidden_size)``, or what the next pipeline rank needs."""
        if get_pp_group().is_first_rank:
            hidden = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
            if self.embedding_multiplier > 0:
                hidden = hidden * self.embedding_multiplier
        else:
            hidden = intermediate_tensors["hidden_states"]
        for layer in islice(self.layers, self.start_layer, self.end_layer):
            hidden = layer(positions, hidden)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden})
        found: torch.Tensor = self.final_layernorm(hidden)
        return found


class Phi3SmallForCausalLM(nn.Module, SupportsPP):  # type: ignore[misc] # vLLM is not installed where types are checked
    """Phi-3-small by vLLM's model interface."""

    dummy_token_indices: torch.Tensor

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        choose_backend(vllm_config)
        config = self.config = vllm_config.model_config.hf_config
        self.model = Phi3SmallModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "lm_head"),
        )
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(config.vocab_size, scale=1 / (config.mup_width_multiplier or 1.0))
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors
        # Rows of the vocabulary that the tokenizer never uses.
        unused = torch.tensor(getattr(config, "dummy_token_indices", None) or [], dtype=torch.int64)
        self.register_buffer("dummy_token_indices", unused, persistent=False)

    def embed_input_ids(self, input_ids: torch.Tensor | None) -> torch.Tensor:
        """Return the embeddings of tokens, not yet scaled."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Return what the decoder returns."""
        found: torch.Tensor | IntermediateTensors = self.model(
            input_ids, positions, intermediate_tensors, inputs_embeds
        )
        return found

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Return the logits, ``(num_tokens, vocab_size)``; those of unused tokens are -inf."""
        logits = self.logits_processor(self.lm_head, hidden_states)
        if logits is not None and self.dummy_token_indices.numel():
            logits.index_fill_(-1, self.dummy_token_indices, -torch.inf)
        return logits  # type: ignore[no-any-return]  # vLLM is untyped here

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """
        Copy the checkpoint's tensors that this rank holds, and return the names of the parameters written.

        Raises:
            RequirementsError: A tensor belongs to no parameter.
        """
        params, loaded = dict(self.named_parameters()), set()
        for name, weight in weights:
            is_derived = "rotary_emb.inv_freq" in name or (name == "lm_head.weight" and self.config.tie_word_embeddings)
            if not is_derived and not is_pp_missing_parameter(name, self):
                _load(params, name, weight, self.config)
                loaded.add(name)
        return loaded


def choose_backend(vllm_config: VllmConfig) -> None:
    """
    Let attnplug decide where no backend was chosen: vLLM's own do not compute block-sparse attention.

    Raises:
        RequirementsError: A backend of vLLM was chosen, and a layer has a pattern, which that backend would drop.
    """
    attention, sparse = vllm_config.attention_config, any(patterns(vllm_config.model_config.hf_config))
    if attention.backend is None and sparse:
        attention.backend = AttentionBackendEnum[names.own_name(())]
    elif sparse and not names.is_own(attention.backend):
        raise RequirementsError(
            f"the attention backend {attention.backend.name} was chosen for Phi-3-small",
            "its layers are block-sparse, which no backend of vLLM computes",
            "leave --attention-backend out, or choose one of attnplug",
        )


def _load(params: dict[str, nn.Parameter], name: str, weight: torch.Tensor, config: Any) -> None:
    """Copy one tensor of the checkpoint, whole or part by part."""
    if name not in params:
        raise RequirementsError(
            f"the checkpoint has {name!r}",
            "Phi-3-small has no such parameter",
            "load a checkpoint of Phi3SmallForCausalLM without adapters",
        )
    load = getattr(params[name], "weight_loader", default_weight_loader)
    is_fused = QKV in name or UP in name
    for part in split_fused(name, weight, config) if is_fused else [(weight,)]:
        load(params[name], *part)
