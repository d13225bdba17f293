"""How many examples hypothesis tries of a property: a quarter in CI, ten times as many in `make test-all`."""

from __future__ import annotations

import os
from typing import Final

CI: Final = bool(os.environ.get("CI"))
SCALE: Final = float(os.environ.get("EXAMPLES_SCALE") or (0.25 if CI else 1))


def examples(count: int) -> int:
    """
    Return the number of examples to try of a property that a developer's run tries `count` of.

    At least ten. Bugs that hypothesis found stay as explicit examples, which every run tries.
    """
    return max(10, round(count * SCALE))
