"""Writes the custom node folder into a checkout of ComfyUI."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from attnplug.errors import RequestError

NAME: Final = "attnplug"
"""The folder's name below ``custom_nodes``."""

SOURCE: Final = Path(__file__).parent / "custom_node"
"""The folder in this distribution."""


def install(comfyui: str | Path, *, link: bool = False) -> Path:
    """
    Write the folder ``custom_nodes/attnplug``; return it. A second call renews it.

    Args:
        comfyui: The checkout of ComfyUI: the folder that has ``custom_nodes``.
        link: Whether it is a link to this distribution instead of a copy.

    Raises:
        RequestError: There is no such checkout, or the folder is something else.
    """
    parent = Path(comfyui).expanduser() / "custom_nodes"
    if not parent.is_dir():
        raise RequestError(
            f"{str(comfyui)!r} has no folder custom_nodes",
            "a checkout of ComfyUI has one",
            "name the folder that has ComfyUI's main.py",
        )
    target = parent / NAME
    text = (SOURCE / "__init__.py").read_text("utf-8")
    _refuse_other(target)
    if target.is_symlink():
        target.unlink()
    if link:
        if target.exists():
            (target / "__init__.py").unlink(missing_ok=True)
            target.rmdir()
        target.symlink_to(SOURCE, target_is_directory=True)
        return target
    target.mkdir(exist_ok=True)
    (target / "__init__.py").write_text(text, "utf-8")
    return target


def _refuse_other(target: Path) -> None:
    """
    Leave what is not this folder as it is.

    Raises:
        RequestError: There is something else.
    """
    if target.is_symlink() or not target.exists():
        return
    files = sorted(one.name for one in target.iterdir() if one.name != "__pycache__") if target.is_dir() else ["a file"]
    first = target / "__init__.py"
    is_ours = files in ([], ["__init__.py"]) and (not files or "attnplug_comfyui" in first.read_text("utf-8"))
    if not is_ours:
        raise RequestError(
            f"{str(target)!r} has something else: {', '.join(files)}",
            "it is the folder of attnplug-comfyui, or does not exist",
            "move it away, and run this once more",
        )
