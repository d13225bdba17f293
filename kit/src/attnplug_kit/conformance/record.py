"""What a test of the kit found out, kept with pytest's own report of it: capabilities that were served, and errors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from attnplug.request import FIELDS, Names, Table
from attnplug_kit.oracle.closeness import tolerance

if TYPE_CHECKING:
    import pytest
    from torch import Tensor

    from attnplug.contract import Backend
    from attnplug_kit.oracle.running import RunResult
    from attnplug_kit.oracle.scene import Scene

EXERCISED = "attnplug exercised"
ERROR = "attnplug error"
SUBJECT = "attnplug subject"
"""The names of the properties that tests add to their report."""


class Record:
    """
    The notes of one test.

    Args:
        node: The test.
    """

    def __init__(self, node: pytest.Item) -> None:
        self._properties = node.user_properties

    def exercised(self, field: str, value: Any) -> None:
        """Note that a declared value was asked for, and served."""
        self._add(EXERCISED, text_of(field, value))

    def served(self, backend: Backend) -> None:
        """Note everything that an agreement asks for."""
        asked, agreed = backend.agreement.requirements, backend.agreement
        facts = {**asked.facts(), "block_size": agreed.block_size, "kv_layout": agreed.kv_layout}
        facts |= {name: value for name, value in backend.device_properties.facts().items() if value is not None}
        facts.pop("cudagraph")  # noted where something is replayed
        if asked.head_size_v == asked.head_size:
            facts.pop("head_size_v")
        if asked.kv_cache_dtype == asked.dtype:
            facts["kv_cache_dtype"] = "auto"
        for name, value in facts.items():
            if isinstance(FIELDS[name].domain, Names):
                for item in value:
                    self.exercised(name, (item,))
            elif value is not None:
                self.exercised(name, value)

    def errors(self, backend: Backend, scene: Scene, ran: RunResult) -> None:
        """Note how far results are from the oracle's: the largest and the mean error, beside the tolerance."""
        exact, scaled = scene.expected(), scene.rounding is not None
        limit = tolerance(ran.output.dtype, scaled_keys=scaled, byte_weights=scene.has_byte_weights)
        self._error(backend, "output", ran.output, exact.output, (limit.atol * scene.largest_value, limit.rtol))
        if backend.agreement.requirements.return_lse:
            wanted = exact.lse_with_sink if backend.impl_class.lse_includes_sink else exact.lse
            self._error(backend, "lse", ran.lse, wanted, (limit.lse, limit.lse))

    def _error(self, backend: Backend, what: str, got: Tensor, exact: Tensor, limit: tuple[float, float]) -> None:
        finite = exact.isfinite()
        error = (got.detach().cpu().double() - exact).abs()[finite]
        if not error.numel():
            return
        dtype, cached = backend.agreement.requirements.dtype, backend.agreement.kv_cache_dtype
        sums = {"max": float(error.max()), "mean": float(error.mean()), "count": error.numel()}
        where = {"dtype": dtype, "kv_cache_dtype": cached if cached != dtype else "auto", "what": what}
        self._add(ERROR, json.dumps({**where, **sums, "atol": limit[0], "rtol": limit[1]}, sort_keys=True))

    def _add(self, name: str, note: str) -> None:
        if (name, note) not in self._properties:
            self._properties.append((name, note))


def text_of(field: str, value: Any) -> str:
    """
    Return a declared value as JSON text, as notes and evidence files have it: a table as an object.

    Args:
        field: The field.
        value: The value, as the requirements have it.
    """
    plain = dict(value) if isinstance(FIELDS[field].domain, Table) else value
    return json.dumps({"field": field, "value": plain}, default=str, sort_keys=True)
