"""How SGLang calls what attnplug offers: values of ``--attention-backend``."""

from __future__ import annotations

from typing import Final

from attnplug.errors import UnknownBackendError

AUTO: Final = "attnplug"
"""The name that leaves the choice to attnplug."""

_SEPARATOR: Final = ":"


def name_of(candidate_id: str) -> str:
    """Return the name of a candidate: ``attnplug:flash_attn/fa3`` for ``flash_attn/fa3``."""
    return f"{AUTO}{_SEPARATOR}{candidate_id}"


def is_own(name: str | None) -> bool:
    """Whether a value of ``--attention-backend`` is a name of ours, registered or not."""
    return name is not None and (name == AUTO or name.startswith(f"{AUTO}{_SEPARATOR}"))


def backend_of(name: str) -> str | None:
    """
    Return the identifier in a name of ours, or None where attnplug decides.

    Raises:
        UnknownBackendError: The name is not ours, or names nothing after the colon.
    """
    if name == AUTO:
        return None
    backend = name.removeprefix(f"{AUTO}{_SEPARATOR}")
    if not is_own(name) or not backend:
        raise UnknownBackendError(
            f"{name!r} was given as a name of a backend of attnplug in SGLang",
            f"the names are {AUTO!r}, and {AUTO!r} with a colon and a backend",
            f"pass --attention-backend {AUTO}, or --attention-backend {name_of('torch/sdpa')}",
        )
    return backend
