"""Orders of a plugin's own variants that never apply."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.manifest import locate
from attnplug_kit.check.finding import Finding
from attnplug_kit.check.reach import always_holds
from attnplug_kit.check.rules import cannot_hold

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.manifest import Manifest, Preference


def check_preferences(manifest: Manifest, text: str) -> Iterator[Finding]:
    """Yield what is wrong with the preferences of a manifest that reads."""
    for index, preference in enumerate(manifest.prefer):
        why = _never(manifest, index)
        line = locate(text, ("prefer", index))
        if why:
            yield Finding(
                f"an order that never applies: {list(preference.order)}",
                why,
                "correct its condition, move it up, or remove it",
                manifest.path,
                line,
            )
        elif len(manifest.variants) == 1:
            yield Finding(
                f"an order of one variant: {list(preference.order)}",
                "there is no other variant, so that nothing is preferred",
                "remove it",
                manifest.path,
                line,
                "note",
            )


def _never(manifest: Manifest, index: int) -> str:
    preference = manifest.prefer[index]
    hidden = next((i for i, earlier in enumerate(manifest.prefer[:index]) if _hides(earlier, preference, manifest)), -1)
    if hidden >= 0:
        return f"the first order whose conditions hold counts, and that of number {hidden + 1} hold whenever these do"
    return cannot_hold(preference.when, manifest.variants) if preference.when else ""


def _hides(earlier: Preference, later: Preference, manifest: Manifest) -> bool:
    return all(
        condition in later.when or all(always_holds(condition, variant) for variant in manifest.variants)
        for condition in earlier.when
    )
