"""The entry point of the ``attnplug`` command: one command, and every mistake in three lines instead of a traceback."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from attnplug.cli.parser import parse
from attnplug.commands import INTERRUPTED, NO, OK, PIPE_CLOSED, WRONG, make_printable, report_error
from attnplug.errors import AttnplugError, RequestError, UnknownBackendError

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command line and return its exit code (`attnplug.commands`).

    Args:
        argv: The words after the command's name; those of this process by default.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    make_printable()
    try:
        code = _answer(words)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _answer(words: Sequence[str]) -> int:
    try:
        module, arguments = parse(words)
        return int(module.run(arguments))
    except SystemExit as done:  # argparse leaves this way once it has printed help
        return int(done.code or OK)
    except AttnplugError as error:
        report_error(error, as_json="--json" in words)
        return WRONG if isinstance(error, (RequestError, UnknownBackendError)) else NO


def _drop_output() -> None:
    """Point standard output elsewhere, so that the interpreter's own flush at exit does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
