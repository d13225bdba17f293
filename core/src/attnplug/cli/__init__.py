"""The ``attnplug`` command: a module for each built-in command, imported only when that command runs."""

from __future__ import annotations

from typing import Final

BUILT_IN: Final = {
    "list": "installed and known backends, and what each is missing",
    "explain": "the backend that serves a layer or a model, and why the others do not",
    "plan": "the attention of a whole model: decisions, KV cache, tensor parallelism",
    "options": "the options of each installed backend",
    "doctor": "problems in this environment",
}
"""The built-in commands with their summaries; each is a module of this package. No distribution can replace them."""

HELP: Final = "help"
"""The command that describes another one, as ``attnplug help list``. No distribution can replace it either."""
