"""Which tests the whole kit has for a subject, so that a run of some of them is known as a part."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from attnplug_kit.conformance import Conformance

if TYPE_CHECKING:
    from attnplug_kit.conformance.subject import Subject


def tests_of_kit(subject: Subject) -> frozenset[str]:
    """
    Return the names of all tests that `Conformance` has for a subject, each with its parameters in brackets.

    It is computed and not collected: what ``-k``, a test's id, a class with some of the parts or an interruption leaves
    out has no trace in what pytest collects.
    """
    kit, names = Conformance(), []
    for name, test in inspect.getmembers(Conformance, inspect.isfunction):
        if name.startswith("test_") and "subject" in inspect.signature(test).parameters:
            found = kit._parameters(test, subject)  # noqa: SLF001 - vendors inherit the class, and see no such method
            names += [f"{name}[{parameters.id}]" for parameters in found]
    return frozenset(names)
