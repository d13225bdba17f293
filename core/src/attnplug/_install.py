"""How to install the distributions of this repository."""

from __future__ import annotations

ON_INDEX = False
"""Whether the package index has them: the first release that is uploaded sets it."""


def is_on_index() -> bool:
    """Return whether the package index has the distributions of this repository."""
    return ON_INDEX


def install_text(distribution: str) -> str:
    """
    Return the command that installs the kit, or an adapter of an engine.

    Args:
        distribution: Its name, such as ``attnplug-kit`` or ``attnplug-vllm``.
    """
    if ON_INDEX:
        return f"pip install {distribution}"
    name = distribution.removeprefix("attnplug-")
    return f"in a checkout of attnplug: pip install ./{name if name == 'kit' else f'hosts/{name}'}"
