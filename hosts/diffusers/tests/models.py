"""Small models of diffusers, each with inputs and how many calls of attention a forward makes."""

from __future__ import annotations

import torch
from attrs import frozen

MASK = torch.ones(2, 12, dtype=torch.long)
MASK[1, 7:] = 0


@frozen
class Small:
    """
    A model.

    Attributes:
        model: The model.
        inputs: The arguments of its forward.
        calls: Calls of attention in one forward.
    """

    model: torch.nn.Module
    inputs: dict
    calls: int

    def __call__(self):
        """Return the output."""
        return self.model(**self.inputs, return_dict=False)[0]


def flux(diffusers):
    """Joint attention of text and image, then single blocks."""
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 16, 4),
        "encoder_hidden_states": torch.randn(2, 12, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.rand(2),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(12, 3),
    }
    return Small(model.eval(), inputs, 2)


def wan(diffusers):
    """Self-attention, and cross-attention to the text."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 12, 16),
        "timestep": torch.tensor([1, 2]),
    }
    return Small(model.eval(), inputs, 4)


def wan_of_images(diffusers):
    """The same with image tokens, which every cross-attention attends to by a second call."""
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32, image_dim=16, added_kv_proj_dim=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(2, 512, 16),  # the processor splits the text off as the last 512
        "encoder_hidden_states_image": torch.randn(2, 5, 16),
        "timestep": torch.tensor([1, 2]),
    }
    return Small(model.eval(), inputs, 3)


def qwen(diffusers):
    """Joint attention of text and image, with padded text."""
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 16, 16),
        "encoder_hidden_states": torch.randn(2, 12, 16),
        "encoder_hidden_states_mask": MASK.bool(),
        "timestep": torch.rand(2),
        "img_shapes": [(1, 4, 4)] * 2,
    }
    return Small(model.eval(), inputs, 2)


def hunyuan(diffusers):
    """A refiner of the text, joint attention, single blocks; padded text."""
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1, num_single_layers=1,
        num_refiner_layers=1, patch_size=1, patch_size_t=1, guidance_embeds=True, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 4, 4),
        "encoder_hidden_states": torch.randn(2, 12, 16),
        "encoder_attention_mask": MASK,
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([1, 2]),
        "guidance": torch.tensor([1.0, 1.0]),
    }
    return Small(model.eval(), inputs, 3)


def sd3(diffusers):
    """Processors that call torch's function; the first block has a second self-attention."""
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=8,
        pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "pooled_projections": torch.randn(2, 8),
        "timestep": torch.tensor([1, 2]),
    }
    return Small(model.eval(), inputs, 3)


def cosmos(diffusers):
    """Processors that dispatch without a backend."""
    model = diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
        text_embed_dim=32, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2), rope_scale=(2.0, 1.0, 1.0),
        concat_padding_mask=False, extra_pos_embed_type="learnable",
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 1, 16, 16),
        "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "attention_mask": torch.ones(1, 8, dtype=torch.bool),
        "fps": 30,
    }
    return Small(model.eval(), inputs, 4)


def unet(diffusers):
    """The processors of older models, and cross-attention."""
    model = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12, attention_head_dim=2,
    )  # fmt: skip
    inputs = {
        "sample": torch.randn(2, 4, 8, 8),
        "timestep": torch.tensor([1, 2]),
        "encoder_hidden_states": torch.randn(2, 12, 12),
        "encoder_attention_mask": MASK.bool(),
    }
    return Small(model.eval(), inputs, 8)


def vae(diffusers):
    """An autoencoder, whose blocks call torch's function without a processor."""
    model = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True], latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )  # fmt: skip
    return Small(model.eval(), {"sample": torch.randn(1, 3, 1, 16, 16)}, 2)


MODELS = {one.__name__: one for one in (flux, wan, wan_of_images, qwen, hunyuan, sd3, cosmos, unet, vae)}
