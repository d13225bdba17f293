"""The plugin of every wrong backend: it is registered under the name of a defect, or of a module of a mutant."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from kit.tests.conformance.defects import (  # noqa: F401 - each defines some of the defects
    first_mistakes,
    kind_inputs,
    loose_at_length,
    other_fields,
    plainest_request,
    small_numbers,
)
from kit.tests.conformance.defects.defect import Defect, backend_of
from kit.tests.conformance.minimal.least import LeastBackend
from kit.tests.conformance.sparse.patterned import PatternedBackend

HERE = Path(__file__).parents[1]
BASES = {"mutants": TorchBackend, "sparse": PatternedBackend, "wrong": LeastBackend}
"""The folders of mutants -> the backend that is right."""


@hookimpl
def attnplug_backend(agreement):
    name = agreement.backend
    return backend_of(Defect.all[name]()) if name in Defect.all else mutant(name)


def mutant(name):
    """Return the backend of a mutant's module, which has the whole class or one of these parts."""
    (folder,) = (each for each in BASES if (HERE / each / f"{name}.py").exists())
    found = vars(import_module(f"kit.tests.conformance.{folder}.{name}"))
    parts = {"impl_class": found.get("MutantImpl"), "builder_class": found.get("MutantBuilder")}
    wrong = {place: part for place, part in parts.items() if part is not None}
    return found.get("MutantBackend") or type("MutantBackend", (BASES[folder],), wrong)
