"""
The names that vLLM has for the backends of attnplug once its plugins are loaded. A program: it writes them as JSON to
standard output. `attnplug_vllm.report` runs it in a process that ends afterwards.
"""

from __future__ import annotations

from typing import Any

from attnplug_vllm.stand_in import answering


def names(_request: Any) -> dict[str, Any]:
    """Load vLLM's plugins as each of its processes does, and return the names of attnplug."""
    from vllm.plugins import load_general_plugins  # noqa: PLC0415 - imports torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415 - likewise

    from attnplug_vllm.names import is_own  # noqa: PLC0415 - likewise

    load_general_plugins()
    return {"names": [name for name, member in AttentionBackendEnum.__members__.items() if is_own(member)]}


if __name__ == "__main__":
    answering(names)
