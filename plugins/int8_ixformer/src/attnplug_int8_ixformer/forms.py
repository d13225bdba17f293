"""What kernels are compiled for, beside the sizes of tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton

if TYPE_CHECKING:
    from attnplug_int8_ixformer.pages import Pages
    from attnplug_int8_ixformer.terms import Terms

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether kernels are run by Triton's interpreter, on any device."""


def width_of(size: int) -> int:
    """Return a power of 2 that holds a head: tiles are of those alone."""
    return int(triton.next_power_of_2(size))


def page_strides(pages: Pages) -> tuple[int, ...]:
    """Return the strides of keys, values and scales."""
    return (*pages.keys.stride()[:3], *pages.values.stride()[:3], *pages.key_scales.stride()[:2])


def forms_of(terms: Terms) -> tuple[object, ...]:
    """Return whether there is a window, whether scores are capped, and the kind of ALiBi."""
    alibi = 0 if terms.slopes is None else 2 if terms.is_sqrt else 1
    return terms.left >= 0, terms.soft_cap > 0, alibi
