"""The progress of `Engine.generate`, on a terminal."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attnplug.errors import RequirementsError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attnplug_transformers.engine.request import Request


def check_progress(progress: object) -> None:
    """
    Check the option of a caller.

    Raises:
        RequirementsError: It is no boolean.
    """
    if not isinstance(progress, bool):
        raise RequirementsError(
            f"progress={progress!r} was given", "progress is a boolean", "pass progress=True for a bar on a terminal"
        )


@contextmanager
def progress_bar(requests: Sequence[Request], *, shown: bool) -> Iterator[Callable[[], None]]:
    """
    Show a bar on standard error while the body runs, and remove it at the end. It is only shown on a terminal.

    Args:
        requests: The requests that the body runs.
        shown: Whether there is a bar.

    Yields:
        What updates the bar.
    """
    if not shown or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console  # noqa: PLC0415 - costs 60 ms, which is for those who look at it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (
        TextColumn("generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=len(requests), tokens=0)

        def update() -> None:
            done = sum(request.is_finished for request in requests)
            bar.update(task, completed=done, tokens=sum(one.num_tokens - one.num_prompt_tokens for one in requests))

        yield update
