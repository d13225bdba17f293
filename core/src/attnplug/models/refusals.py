"""Which configurations requirements cannot express, and which are not known: refused with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.errors import RequirementsError, near
from attnplug.models.architectures import ARCHITECTURES, BIASED, FORBIDDEN_FIELDS, LATENT, REFUSED, Architecture

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from attnplug.models.fields import Fields


def check_expressible(fields: Fields, assume: str | None) -> Architecture:
    """
    Return how a configuration is read.

    Raises:
        RequirementsError: Requirements cannot express its attention, or its model type is unknown.
    """
    why = forbidden(fields)
    if why is not None:
        raise inexpressible(fields, why)
    refuse_by_name(fields)
    check_assumed(fields, assume)
    name = assume or fields.model_type
    if name not in ARCHITECTURES:
        raise RequirementsError(
            f"{fields.origin} is of model type {name!r}{near(name, list(ARCHITECTURES))}",
            f"the {len(ARCHITECTURES)} known model types are in attnplug.models.architectures",
            "pass assume='llama' (or another type described there) if its layers are alike, --assume llama on the"
            " command line; otherwise keep transformers' own attention for it, or build the Requirements by hand",
        )
    return ARCHITECTURES[name]


def forbidden(fields: Fields) -> str | None:
    """Return why no requirements describe the attention, where a field says so."""
    for name, why in FORBIDDEN_FIELDS.items():
        value = fields.data.get(name)
        if value and not (name == "use_bidirectional_attention" and value == "vision"):  # text reads causally there
            return f"{why} ({name}={value!r})" if isinstance(value, (bool, int, float, str)) else f"{why} ({name})"
    positions = fields.data.get("position_embedding_type")
    if str(positions or "").startswith("relative"):
        return f"its scores depend on relative positions (position_embedding_type={positions!r})"
    return None


def check_assumed(fields: Fields, assume: str | None) -> None:
    """
    Refuse an assumption about a known model type, or of an unknown type.

    Raises:
        RequirementsError: It is one of these.
    """
    known = any(fields.model_type in table for table in (ARCHITECTURES, BIASED, LATENT))
    if assume is None or (assume == fields.model_type and known):
        return
    given = f"assume={assume!r} was given for {fields.origin} of model type {fields.model_type!r}"
    if not isinstance(assume, str) or assume not in ARCHITECTURES:
        raise RequirementsError(
            given,
            f"the {len(ARCHITECTURES)} known model types are in attnplug.models.architectures",
            "leave assume out, or pass assume='llama' (or another one described); on the command line, --assume llama",
        )
    if known:
        raise RequirementsError(
            given,
            f"{fields.model_type!r} is known, and not read as another type",
            "leave assume out; on the command line, --assume",
        )


def refuse_by_name(fields: Fields) -> None:
    """
    Refuse a model type that is known for attention that requirements cannot express.

    Raises:
        RequirementsError: It is one of these.
    """
    if fields.model_type in REFUSED:
        raise inexpressible(fields, REFUSED[fields.model_type])


def refuse_gaps(
    fields: Fields, architecture: Architecture, kinds: Sequence[str], described: Collection[int], fix: str
) -> None:
    """
    Refuse a model of which some layers are not attention over keys.

    Raises:
        RequirementsError: It is such a model.
    """
    if architecture.beside:
        raise RequirementsError(
            f"{fields.origin}: each attention layer has {architecture.beside} beside it",
            "that is not attention over keys, and no backend here serves it",
            fix,
        )
    others = {kind for index, kind in enumerate(kinds) if index not in described}
    if others:
        raise RequirementsError(
            f"{fields.origin}: {len(kinds) - len(described)} of {len(kinds)} layers are {', '.join(sorted(others))}",
            "those are not attention over keys, and no backend here serves them",
            fix,
        )


def inexpressible(
    fields: Fields, why: str, fix: str = "keep transformers' own attention for this model"
) -> RequirementsError:
    """Return the error for attention that requirements cannot express."""
    return RequirementsError(
        f"{fields.origin} is of model type {fields.model_type!r}",
        f"no requirements describe its attention: {why}",
        fix,
    )
