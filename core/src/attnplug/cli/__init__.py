"""The ``attnplug`` command: a module for each built-in command, imported only when that command runs."""

from __future__ import annotations

from typing import Final

BUILT_IN: Final = {
    "list": "what is installed, and what is missing for the rest",
    "explain": "which backend serves a layer or a model, and why not the others",
    "plan": "the attention of a whole model: decisions, KV cache, tensor parallelism",
    "options": "what can be set for each installed backend",
    "doctor": "what is wrong with this environment",
}
"""The built-in commands with their summaries; each is a module of this package. No distribution can replace them."""

HELP: Final = "help"
"""The command that describes another one, as ``attnplug help list``. No distribution can replace it either."""
