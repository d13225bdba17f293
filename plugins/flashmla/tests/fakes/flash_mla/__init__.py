"""A fake of sgl-flash-mla: the entry points that the plugin calls, with the signatures of the library."""

from flash_mla import flash_mla_interface

__version__ = "1.0.0"
__all__ = ["__version__", "flash_mla_interface"]
