"""Writes the custom node folder into a checkout of ComfyUI."""

from __future__ import annotations

from pathlib import Path
from shutil import rmtree
from typing import Final

from attnplug.errors import RequestError

NAME: Final = "attnplug"
"""The folder's name below ``custom_nodes``."""

SOURCE: Final = Path(__file__).parent / "custom_node"
"""The folder in this distribution."""

_NAMED: Final = "from attnplug_comfyui"
"""What the file of the folder has in it."""


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
            rmtree(target)
        target.symlink_to(SOURCE, target_is_directory=True)
        return target
    target.mkdir(exist_ok=True)
    (target / "__init__.py").write_text(text, "utf-8")
    return target


def _refuse_other(target: Path) -> None:
    """Leave what is not this folder as it is."""
    if target.is_symlink():
        linked = target.readlink()
        found, is_ours = f"a link to {linked}", linked.parts[-2:] == SOURCE.parts[-2:]
    elif target.is_dir():
        files = sorted(one.name for one in target.iterdir() if one.name != "__pycache__")
        found = ", ".join(files)
        is_ours = not files or (files == ["__init__.py"] and _NAMED in (target / "__init__.py").read_text("utf-8"))
    else:
        found, is_ours = "a file", not target.exists()
    if not is_ours:
        raise RequestError(
            f"{str(target)!r} has something else: {found}",
            "it is the folder of attnplug-comfyui, or does not exist",
            "move it away, and run this once more",
        )
