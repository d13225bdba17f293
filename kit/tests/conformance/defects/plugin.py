"""The plugin of every backend with a defect: the name that it is registered under is the defect's."""

from __future__ import annotations

from attnplug.contract import hookimpl
from kit.tests.conformance.defects import (  # noqa: F401 - each defines some of the defects
    first_mistakes,
    kind_inputs,
    loose_at_length,
    other_fields,
    plainest_request,
    small_numbers,
)
from kit.tests.conformance.defects.defect import Defect, backend_of


@hookimpl
def attnplug_backend(agreement):
    return backend_of(Defect.all[agreement.backend]())
