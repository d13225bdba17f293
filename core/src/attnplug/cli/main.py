"""The entry point of the ``attnplug`` command: it runs one command, and prints an error instead of a traceback."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attnplug.cli.parser import parse
from attnplug.commands import INTERRUPTED, NO, OK, PIPE_CLOSED, WRONG, complain, describe_error, say_json, wrapped
from attnplug.errors import AttnplugError, RequestError, UnknownBackendError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run a command line and return its exit code (`attnplug.commands`).

    Args:
        argv: The words after the program's name; those of this process by default.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if "_ARGCOMPLETE" in os.environ:  # a shell asks how the line could go on
        from attnplug.cli.completion import complete  # noqa: PLC0415 - only for a shell

        complete()
    _make_printable()
    try:
        with _logged_warnings():
            code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None:
            raise  # of a file: nothing of a command raises that
        _drop_output()
        complain(f"attnplug: the output cannot be written: {error.strerror or error}")
        return NO
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


class _Complaints(logging.Handler):
    """Prints warnings as everything else is printed. Without a handler, logging prints them as they are."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"attnplug: {record.levelname.lower()}: {self.format(record)}")


@contextmanager
def _logged_warnings() -> Iterator[None]:
    root, handler = logging.getLogger(), _Complaints(logging.WARNING)
    if root.handlers:  # of the process that has called `main`
        yield
        return
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def _run(words: Sequence[str]) -> int:
    try:
        return parse(words)()
    except SystemExit as done:  # argparse leaves this way once it has printed help
        return _exit_code(done)
    except AttnplugError as error:
        _report(error, as_json="--json" in words)
        return WRONG if isinstance(error, (RequestError, UnknownBackendError)) else NO


def _exit_code(done: SystemExit) -> int:
    """Return the exit code as Python does: a text is printed, and means 1."""
    if done.code is None or isinstance(done.code, int):
        return done.code or OK
    complain(str(done.code))
    return NO


def _make_printable() -> None:
    """Print characters that the output's encoding does not have as escapes, instead of failing half-way."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _drop_output() -> None:
    """Point standard output elsewhere, so that the interpreter's flush at exit does not complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: AttnplugError, *, as_json: bool) -> None:
    """Write an error: to standard error, and as JSON to standard output too where JSON was requested."""
    if as_json:
        say_json({"error": describe_error(error)})
    if _is_strict():
        import traceback  # noqa: PLC0415 - for plugin authors, on request

        complain("".join(traceback.format_exception(error)).rstrip())
    else:
        complain("\n".join(_fitted(f"attnplug: {error}")))


def _fitted(text: str) -> Iterator[str]:
    """Yield the lines of an error as a terminal shows them; elsewhere each stays whole, for those who search in it."""
    if not sys.stderr.isatty():
        yield text
        return
    for line in text.split("\n"):
        yield from wrapped(line.lstrip(), " " * (len(line) - len(line.lstrip())))


def _is_strict() -> bool:
    """Read the strict setting again: the error may be about a setting that does not parse."""
    from attnplug.request.settings import Settings  # noqa: PLC0415 - only errors need it

    try:
        return Settings.read().strict
    except AttnplugError:
        return False
