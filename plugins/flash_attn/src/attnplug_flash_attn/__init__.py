"""The attention backend flash_attn, for attnplug: FlashAttention 2, 3 and 4, and the kernels inside torch."""
