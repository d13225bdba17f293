"""A fake of flash-attn-4. What it exports is public; what its interface has beside is called by name."""

from flash_attn.cute.interface import flash_attn_varlen_func

__all__ = ["flash_attn_varlen_func"]
