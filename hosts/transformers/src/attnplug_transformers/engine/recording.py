"""Whether an engine records its decode steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug_transformers.engine.groups import Groups
    from attnplug_transformers.engine.runner import Runner

_log = logging.getLogger(__name__)


def record(model: Any, groups: Groups, runner: Runner, graphs: bool | None) -> str | None:  # noqa: FBT001 - a caller's choice
    """
    Record decode steps where they are wanted.

    Args:
        model: The model.
        groups: Its backends.
        runner: What records.
        graphs: True where they have to be recorded, False where they are not to be; None records where that helps.

    Returns:
        Why all steps run eagerly, or None where they do not.
    """
    if graphs is False:
        return "graphs=False was asked for"
    if graphs is None and runner.device.type != "cuda":
        return f"{runner.device} has no graphs of its own; graphs=True records steps there too"
    weakest = groups.plan.weakest.selection
    if weakest.agreement.cudagraph == "never":
        return f"{weakest.id} runs without graphs here"
    try:
        runner.record()
    except Exception as error:
        if graphs:
            raise
        # A model may look at values on the host, which a graph cannot; its steps are as right without.
        reason = f"{type(model).__name__} cannot be recorded: {error}"
        _log.warning("%s; its steps run eagerly", reason)
        return reason
    return None
