"""Tasks in separate threads, for tests of what happens at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def together(*tasks: Callable[[], object]) -> None:
    """Run tasks in separate threads; raise what the first of them raises."""
    errors: list[BaseException] = []

    def run(task: Callable[[], object]) -> None:
        try:
            task()
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(task,)) for task in tasks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if errors:
        raise errors[0]
