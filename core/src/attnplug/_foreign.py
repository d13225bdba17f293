"""
The guard around code of others: plugins, finders, probes, distributions. Such code may raise anything, and what it
raises may have no text. Only the user's interrupt passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug._escape import escaped_lines

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


class ForeignCode:
    """
    A context in which code of others runs: ``with ForeignCode("the probe of 'acme' raised") as code: ...``.

    Args:
        stage: How its failure begins, with the verb: the exception's type and text follow.
        refuse: Makes the error that is raised from the exception, of the problem. Without it the exception is
            recorded, and the code behind the context goes on.
        passing: Exceptions that are raised as they are.

    Attributes:
        error: The exception; None where nothing was raised.
    """

    __slots__ = ("_passing", "_refuse", "_stage", "error")

    def __init__(
        self,
        stage: str,
        refuse: Callable[[str], BaseException] | None = None,
        *,
        passing: tuple[type[BaseException], ...] = (),
    ) -> None:
        self._stage = stage
        self._refuse = refuse
        self._passing: tuple[type[BaseException], ...] = (KeyboardInterrupt, *passing)
        self.error: BaseException | None = None

    def __enter__(self) -> ForeignCode:  # noqa: PYI034 - `Self` is new in Python 3.11, and nothing derives from this
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool | None:  # not `bool`: behind a context that refuses, mypy need not expect anything to run
        del kind, where
        if error is None or isinstance(error, self._passing):
            return False
        self.error = error
        if self._refuse is not None:
            raise self._refuse(self.problem) from error
        return True

    @property
    def problem(self) -> str:
        """The stage with the exception's type and text, safe to print; empty where nothing was raised."""
        return "" if self.error is None else f"{self._stage} {exception_text(self.error)}"


def exception_text(error: BaseException) -> str:
    """Return the type and the text of any exception, safe to print, also of one whose own text cannot be made."""
    name = type.__getattribute__(type(error), "__name__")
    with ForeignCode("str() of it raises") as code:
        text = "".join(str(error))  # a plain text, whatever subclass it was
    if code.error is not None:
        failed = type.__getattribute__(type(code.error), "__name__")
        return escaped_lines(f"{name} (its text cannot be shown: str() of it raises {failed})")
    return escaped_lines(f"{name}: {shortened(text, 2000)}" if text else name)


def shortened(text: str, longest: int = 255) -> str:
    """Return a text of other people, short enough for a message."""
    return text if len(text) <= longest else f"{text[: longest - 40]}... ({len(text):,} characters)"
