"""Which configurations requirements cannot express, and which are not known: refused with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.errors import RequirementsError, close
from attnplug.models.architectures import ARCHITECTURES, BIASED, FORBIDDEN_FIELDS
from attnplug.models.latent import has_latents

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.models.description import ModelDescription
    from attnplug.models.fields import Fields


def of_close_name(name: str) -> list[str]:
    """Return the known types whose name an unknown one begins with, the longest first, then others of a close name."""
    begins = sorted((known for known in ARCHITECTURES if name.startswith(known)), key=len, reverse=True)
    alike = [known for known in close(name, ARCHITECTURES) if known[0] == name[0]]  # phimoe is no mimo
    return list(dict.fromkeys([*begins, *alike]))


def unknown_type(fields: Fields, name: str, fitting: Sequence[str]) -> RequirementsError:
    """
    Return the error for a model type that is not known.

    Args:
        fields: The configuration.
        name: The type.
        fitting: Known types whose fields fit, the closest name first.
    """
    meant = f"; did you mean {fitting[0]!r}?" if fitting and fitting[0] in of_close_name(name) else ""
    assumed = (
        f"pass assume={fitting[0]!r} if its layers are alike, --assume {fitting[0]} on the command line; otherwise "
        if fitting
        else ""
    )
    return RequirementsError(
        f"{fields.origin} is of model type {name!r}{meant}",
        f"the {len(ARCHITECTURES)} known model types are in attnplug.models.architectures"
        + ("" if fitting else ", and the fields fit none of a close name"),
        f"{assumed}keep transformers' own attention for it, or build the Requirements by hand",
    )


def forbidden(fields: Fields, name: str) -> str | None:
    """Return why no requirements describe the attention of a model type, where a field says so."""
    known = ARCHITECTURES.get(name)
    served = {
        "use_bidirectional_attention": ("vision", *([True] if known and known.both_sides else []))
    }  # text is causal there
    # Another attention than MLA would ignore latents; a type that is not known is refused by its name.
    passed = {"kv_lora_rank"} if known is None or has_latents(fields, known) else set()
    if known is not None and known.indexers is not None:
        passed.add("index_topk")  # described, or its layers are named
    for field, why in FORBIDDEN_FIELDS.items():
        value = fields.data.get(field)
        if value and field not in passed and value not in served.get(field, ()):
            return f"{why} ({field}={value!r})" if isinstance(value, (bool, int, float, str)) else f"{why} ({field})"
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
    known = any(fields.model_type in table for table in (ARCHITECTURES, BIASED))
    if assume is None or (assume == fields.model_type and known):
        return
    given = f"assume={assume!r} was given for {fields.origin} of model type {fields.model_type!r}"
    if not isinstance(assume, str) or assume not in ARCHITECTURES:
        raise RequirementsError(
            given,
            f"the {len(ARCHITECTURES)} known model types are in attnplug.models.architectures",
            "leave assume out" + ("" if known else ", or pass one of those") + "; on the command line, --assume",
        )
    if known:
        raise RequirementsError(
            given,
            f"{fields.model_type!r} is known, and not read as another type",
            "leave assume out; on the command line, --assume",
        )


def inexpressible(
    fields: Fields | ModelDescription, why: str, fix: str = "keep transformers' own attention for this model"
) -> RequirementsError:
    """Return the error for attention that requirements cannot express."""
    return RequirementsError(
        f"{fields.origin} is of model type {fields.model_type!r}",
        f"no requirements describe its attention: {why}",
        fix,
    )
