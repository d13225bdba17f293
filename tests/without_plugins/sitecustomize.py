"""
Hides the workspace's plugins and engines from a process: their metadata is left out when core's folder is listed.

Python imports a module of this name when it starts, so a process with this folder on its PYTHONPATH has core, the kit
and the host for transformers installed, no plugin, and no engine, which `attnplug doctor --load` would import. Nothing
of attnplug is imported, and no file is read before that folder is listed. `tests.command` uses it, in the process of
the tests and in those that they start.
"""

from __future__ import annotations

import os

_listdir = os.listdir


def listdir(folder="."):
    """List a folder as `os.listdir` does. Folders without core, such as a test's own, are listed in full."""
    names = _listdir(folder)
    if not any(isinstance(name, str) and name.startswith("attnplug-") for name in names):
        return names
    return [name for name in names if not _is_hidden(folder, name)]


def _is_hidden(folder, name):
    if not (name.startswith("attnplug_") and name.endswith(".dist-info")):
        return False
    try:
        with open(f"{folder}/{name}/entry_points.txt", encoding="utf-8") as points:  # noqa: PTH123 - pathlib costs 5 ms
            text = points.read()
    except FileNotFoundError:
        return False
    return "[attnplug.backends]" in text or "[attnplug.engines]" in text


if __name__ == "sitecustomize":
    os.listdir = listdir
