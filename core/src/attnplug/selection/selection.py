"""A decision: which candidate, on which terms, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from attnplug._escape import escaped
from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.candidate import CACHE_TERMS
from attnplug.negotiation.received import check_received, is_list, is_table, is_text, table_of
from attnplug.negotiation.verdict import Verdict
from attnplug.request.device import Device
from attnplug.request.tables import read_only

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.contract.loaded import LoadedBackend
    from attnplug.negotiation.reason import Unverified
    from attnplug.request.requirements import Requirements


@frozen
class Selection:
    """
    The chosen candidate.

    Attributes:
        agreement: The terms; `make_impl` and `build` check layers and batches against them.
        device: The device that was selected for.
        verdicts: The verdict on every candidate, the chosen one first.
        decided_by: The criterion that put the winner before the next; empty where only one could serve.
        provenance: Where each setting that took part came from, e.g. ``{"backend": "environment variable
            ATTNPLUG_BACKEND"}``.
    """

    agreement: Agreement
    device: Device
    verdicts: tuple[Verdict, ...] = ()
    decided_by: str = ""
    provenance: Mapping[str, str] = field(factory=dict, converter=read_only, hash=False)

    @property
    def id(self) -> str:
        """``backend/variant``, the same string in every process."""
        return self.agreement.id

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.agreement.backend

    @property
    def variant(self) -> str:
        """The variant's name."""
        return self.agreement.variant

    @property
    def roles(self) -> Mapping[str, Selection]:
        """
        The decisions for ``"decode"``, the pure decodes, and ``"rest"``, all other batches, where they are routed to
        two candidates; empty for a single one. Both are loaded with this decision, and share its KV cache.
        """
        roles = self.agreement.roles
        if roles is None:
            return {}
        return {"decode": evolve(self, agreement=roles.decode), "rest": evolve(self, agreement=roles.rest)}

    @property
    def requirements(self) -> Requirements:
        """What was requested."""
        return self.agreement.requirements

    @property
    def distribution(self) -> str:
        """The distribution that offers the winner, with its version."""
        return next((verdict.distribution for verdict in self.verdicts if verdict.id == self.id), "")

    @property
    def unverified(self) -> tuple[Unverified, ...]:
        """What was requested and no evidence covers on this device."""
        return next((verdict.unverified for verdict in self.verdicts if verdict.id == self.id), ())

    @property
    def late(self) -> tuple[str, ...]:
        """The fields that are left to bind; empty for a decision that can be loaded."""
        return self.requirements.late

    def bind(
        self, *, block_size: int | None = None, num_q_heads: int | None = None, num_kv_heads: int | None = None
    ) -> Selection:
        """
        Settle fields that the requirements name in `late`. Only this candidate is judged, with all of its rules: no
        other one is, nothing is ranked, and nothing is imported.

        Args:
            block_size: Tokens per KV-cache block; None leaves it late.
            num_q_heads: Query heads of this rank, likewise.
            num_kv_heads: Key and value heads of this rank, likewise.

        Returns:
            The decision for the same candidate. Its agreement is what selecting that candidate by name gives for
            requirements with these values.

        Raises:
            NotNegotiatedError: The candidate refuses the values; the error has its reasons, and what would do.
            RequirementsError: A field is not late, or a value is invalid.
            PluginLoadError: The candidate is not here as it was decided on.
        """
        from attnplug.selection.binding import bind_selection  # noqa: PLC0415 - it finds installed plugins

        values = {"block_size": block_size, "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
        return bind_selection(self, values)

    def load(self) -> LoadedBackend:
        """
        Import the plugin, check it, call its probe, and return the backend. Never substitutes another one.

        Raises:
            NotNegotiatedError: Fields are late: they are bound first.
            PluginLoadError: The plugin is not here in the same version, does not import, or its probe refuses.
            PluginContractError: What it returns is not a backend.
        """
        from attnplug.selection.load import load_selection  # noqa: PLC0415 - loading imports torch, deciding does not

        return load_selection(self)

    def __repr__(self) -> str:
        return escaped(f"<Selection: {self}>")

    def __str__(self) -> str:
        terms = self.agreement
        size = terms.block_size if terms.block_sizes is None else f"({terms.block_sizes})"
        values = {name: getattr(terms, name) for name in (*CACHE_TERMS, "kv_cache_dtype", "cudagraph")}
        shown = {**values, "block_size": size}.items() if size is not None else list(values.items())[len(CACHE_TERMS) :]
        return f"{self.id} on {self.device}: {' '.join(f'{name}={value}' for name, value in shown)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values. Another process that reads them loads exactly this decision."""
        return {
            "agreement": self.agreement.to_dict(),
            "device": self.device.to_dict(),
            "verdicts": [verdict.to_dict() for verdict in self.verdicts],
            "decided_by": self.decided_by,
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Selection:
        """
        Read what `to_dict` wrote.

        Raises:
            DecisionError: It is something else.
            RequestError: Its requirements or its device are invalid.
        """
        check_received("a selection", data, _CHECKS)
        return cls(
            agreement=Agreement.from_dict(data["agreement"]),
            device=Device.from_dict(data["device"]),
            verdicts=tuple(Verdict.from_dict(verdict) for verdict in data["verdicts"]),
            decided_by=data["decided_by"],
            provenance=data["provenance"],
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Selection.from_dict, (self.to_dict(),)


_CHECKS = {
    "agreement": is_table,
    "device": is_table,
    "verdicts": is_list,
    "decided_by": is_text,
    "provenance": table_of(is_text),
}
