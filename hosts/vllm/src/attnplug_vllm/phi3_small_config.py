"""The configuration of Phi-3-small, so that vLLM reads its checkpoints without code from a model hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.configuration_utils import PretrainedConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

MODEL_TYPE: Final = "phi3small"
ARCHITECTURE: Final = "Phi3SmallForCausalLM"


class Phi3SmallConfig(PretrainedConfig):  # type: ignore[no-untyped-call] # its hook for subclasses
    """
    The fields of ``config.json``, with the defaults of the published 8K model.

    A field that another checkpoint leaves out has the value that the published configuration gives it.
    """

    model_type = MODEL_TYPE

    def __init__(  # noqa: PLR0913 - the fields of the published configuration
        self,
        *,
        vocab_size: int = 100352,
        max_position_embeddings: int = 8192,
        rope_embedding_base: float = 1e6,
        rope_position_scale: float = 1.0,
        rope_scaling: dict[str, Any] | None = None,
        original_max_position_embeddings: int | None = None,
        hidden_size: int = 4096,
        num_hidden_layers: int = 32,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 8,
        hidden_act: str = "gegelu",
        gegelu_limit: float | None = 20.0,
        gegelu_pad_to_256: bool = True,
        ff_dim_multiplier: int | None = None,
        ff_intermediate_size: int | None = 14336,
        dense_attention_every_n_layers: int | None = 2,
        blocksparse_homo_head_pattern: bool = False,
        blocksparse_block_size: int = 64,
        blocksparse_num_local_blocks: int = 16,
        blocksparse_vert_stride: int = 8,
        layer_norm_epsilon: float = 1e-5,
        mup_use_scaling: bool = True,
        mup_width_multiplier: float | None = 8.0,
        mup_embedding_multiplier: float | None = 10.0,
        mup_attn_multiplier: float = 1.0,
        tie_word_embeddings: bool = True,
        **rest: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.rope_embedding_base = rope_embedding_base
        self.rope_position_scale = rope_position_scale
        self.rope_theta = rope_embedding_base  # transformers' and vLLM's name
        if original_max_position_embeddings is not None:
            self.original_max_position_embeddings = original_max_position_embeddings
        if rope_scaling is not None:
            self.rope_parameters = _rope_parameters(rope_scaling, rope_embedding_base)
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.hidden_act = hidden_act
        self.gegelu_limit = gegelu_limit
        self.gegelu_pad_to_256 = gegelu_pad_to_256
        self.ff_dim_multiplier = ff_dim_multiplier
        self.ff_intermediate_size = ff_intermediate_size
        self.dense_attention_every_n_layers = dense_attention_every_n_layers
        self.blocksparse_homo_head_pattern = blocksparse_homo_head_pattern
        self.blocksparse_block_size = blocksparse_block_size
        self.blocksparse_num_local_blocks = blocksparse_num_local_blocks
        self.blocksparse_vert_stride = blocksparse_vert_stride
        self.layer_norm_epsilon = layer_norm_epsilon
        self.mup_use_scaling = mup_use_scaling
        self.mup_width_multiplier = mup_width_multiplier
        self.mup_embedding_multiplier = mup_embedding_multiplier
        self.mup_attn_multiplier = mup_attn_multiplier
        self.tie_word_embeddings = (
            tie_word_embeddings  # transformers 5 has no default for it; the published file leaves it out
        )
        super().__init__(**rest)

    @property
    def intermediate_size(self) -> int:
        """The width of the feed-forward layers: as configured, or from their multiplier, as the published code does."""
        if self.ff_intermediate_size:
            return int(self.ff_intermediate_size)
        width = (self.ff_dim_multiplier or 4) * (self.hidden_size // 3) * 2
        return -(-width // 256) * 256 if self.gegelu_pad_to_256 else width


def register_model() -> None:
    """
    Let vLLM run Phi-3-small, and transformers read its configuration. A model or configuration of another plugin stays.

    The model is imported when it is first needed.
    """
    from vllm.model_executor.models.registry import ModelRegistry  # noqa: PLC0415 - the class is of use without vLLM

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"attnplug_vllm.phi3_small:{ARCHITECTURE}")
    if MODEL_TYPE not in CONFIG_MAPPING:
        AutoConfig.register(MODEL_TYPE, Phi3SmallConfig)


def _rope_parameters(scaling: Mapping[str, Any], base: float) -> dict[str, Any]:
    """Return rotary parameters by the names of transformers 5; the checkpoints have older ones."""
    found = {name: value for name, value in scaling.items() if name != "type"}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {**found, "rope_type": "longrope" if kind == "su" else kind, "rope_theta": base}
