"""What the exit code of every verb means."""

from __future__ import annotations

from typing import Final

OK: Final = 0
"""The answer is yes."""

NO: Final = 1
"""The answer is no: nothing can serve, something is broken, a budget is missed."""

WRONG: Final = 2
"""The question is wrong: an unknown option, impossible requirements, a setting that does not parse."""

INTERRUPTED: Final = 130
"""The user stopped it (128 + SIGINT)."""

PIPE_CLOSED: Final = 141
"""Whoever read the output went away (128 + SIGPIPE), as ``head`` does."""
