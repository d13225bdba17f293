"""What was agreed on: everything that was requested, and the values that were left open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.errors import DecisionError, ManifestError, shown
from attnplug.manifest.supports import parse_constraint
from attnplug.negotiation.received import (
    check_received,
    is_flag,
    is_list,
    is_name,
    is_option,
    is_table,
    is_value_of,
    optional,
    refuse_received,
    table_of,
)
from attnplug.request.fields import FIELDS
from attnplug.request.requirements import Requirements
from attnplug.request.settings import PAIR
from attnplug.request.tables import read_only

if TYPE_CHECKING:
    from attnplug.manifest.constraint import Constraint

_VERSION: Final = 2
"""Of the terms, in saved decisions. Version 1 could name a graph level that the candidate refuses with its layout."""


@frozen
class Roles:
    """
    The agreements of a routed pair: two candidates that share a KV cache.

    Attributes:
        decode: Of the candidate that attends in pure decodes.
        rest: Of the candidate that attends in all other batches.
    """

    decode: Agreement
    rest: Agreement


@frozen
class Agreement:
    """
    The settled terms between a host and one candidate.

    Attributes:
        backend: Name of the backend.
        variant: Name of the variant.
        requirements: What was requested; all of it is served.
        block_size: Tokens per KV-cache block; None without a paged cache, and while it is late.
        kv_layout: ``"NHD"`` or ``"HND"``; None without a paged cache, and where it depends on a late block size.
        kv_cache_form: Where a block's values are, seen from its keys: ``"joint"``, ``"interleaved"``, ``"split"``,
            ``"packed"`` or ``"independent"``; None as `kv_layout` is.
        kv_cache_dtype: Dtype of the KV cache, canonical.
        cudagraph: The highest graph level that is supported with the other terms, at least the requested one; while the
            block size is late, for each of `block_sizes`.
        options: The plugin's own settings, complete.
        block_sizes: The block sizes that it holds for while the block size is late, most preferred first; None
            otherwise. ``str`` of it is ``"16, multiples of 32"``, `Constraint.alternatives` the same as data.
        reads_lengths: Whether the host has bounds of the lengths on the CPU or none, and the backend needs exact ones,
            or whether it has no query lengths there: each build reads them from the device, which it waits for.
        roles: The agreements of both candidates where pure decodes are routed to one and all other batches to the
            other; None for a single candidate. The terms of the pair follow from them (`attnplug.negotiation.pair`).

    While `requirements.late` names fields, the agreement is unbound: `Selection.bind` settles them.
    """

    backend: str
    variant: str
    requirements: Requirements
    block_size: int | None
    kv_layout: str | None
    kv_cache_form: str | None
    kv_cache_dtype: str
    cudagraph: str
    options: Mapping[str, Any] = field(factory=dict, converter=read_only, hash=False)
    block_sizes: Constraint | None = None
    reads_lengths: bool = False
    roles: Roles | None = None

    @property
    def id(self) -> str:
        """``backend/variant``, the identity of the candidate in every process; of a pair both, joined by ``+``."""
        if self.roles is not None:
            return f"{self.roles.decode.id}{PAIR}{self.roles.rest.id}"
        return f"{self.backend}/{self.variant}"

    def __repr__(self) -> str:
        given = {
            name: value
            for name in ("block_size", "block_sizes", "kv_layout", "kv_cache_form", "kv_cache_dtype", "cudagraph")
            if (value := getattr(self, name)) is not None
        }
        return f"<Agreement: {self.id} {' '.join(f'{name}={value}' for name, value in given.items())}>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values. Those of a pair have ``roles``, which versions without pairs refuse."""
        roles = self.roles
        return {
            "version": _VERSION,
            "backend": self.backend,
            "variant": self.variant,
            "requirements": self.requirements.to_dict(),
            "block_size": self.block_size,
            "kv_layout": self.kv_layout,
            "kv_cache_form": self.kv_cache_form,
            "kv_cache_dtype": self.kv_cache_dtype,
            "cudagraph": self.cudagraph,
            "options": dict(self.options),
            "block_sizes": None if self.block_sizes is None else self.block_sizes.dump(),
            "reads_lengths": self.reads_lengths,
            **({} if roles is None else {"roles": [roles.decode.to_dict(), roles.rest.to_dict()]}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Agreement:
        """
        Read what `to_dict` wrote.

        Raises:
            DecisionError: A value has another type, or the terms another version. Loading checks the terms themselves.
            RequirementsError: The requirements are invalid.
        """
        version = data.get("version", 1) if isinstance(data, Mapping) else _VERSION
        if version != _VERSION:
            raise DecisionError(
                f"a decision with terms of version {shown(version)} was received",
                f"this attnplug reads version {_VERSION}",
                "decide again, or use the same attnplug in both processes",
            )
        is_pair = isinstance(data, Mapping) and "roles" in data
        check_received("the agreement", data, {**_CHECKS, "roles": _is_pair} if is_pair else _CHECKS)
        requirements = Requirements.from_dict(data["requirements"])
        sizes = None if data["block_sizes"] is None else _read_block_sizes(data["block_sizes"])
        if (sizes is not None) != ("block_size" in requirements.late) or None not in (sizes, data["block_size"]):
            refuse_received(f"block_size={data['block_size']} and block_sizes={shown(data['block_sizes'])}")
        roles = Roles(*map(cls.from_dict, data["roles"])) if is_pair else None
        values = {**data, "requirements": requirements, "block_sizes": sizes, "roles": roles}
        return cls(**{name: value for name, value in values.items() if name != "version"})

    def __reduce__(self) -> tuple[Any, ...]:
        return Agreement.from_dict, (self.to_dict(),)  # a read-only view does not pickle


def _read_block_sizes(data: Any) -> Constraint:
    def fail(where: object, problem: str, expected: str, fix: str) -> ManifestError:
        return ManifestError(problem, expected, fix, str(where))

    try:
        return parse_constraint(fail, FIELDS["block_size"], data, ())
    except ManifestError:
        refuse_received(f"block_sizes={shown(data)} of the agreement")


def _is_pair(value: object) -> bool:
    return is_list(value) and len(value) == 2 and all(is_table(each) and "roles" not in each for each in value)  # type: ignore[arg-type, attr-defined]


_CHECKS = {
    "version": lambda version: version == _VERSION,
    "backend": is_name,
    "variant": is_name,
    "requirements": is_table,
    "block_size": optional(is_value_of("block_size")),
    "kv_layout": optional(is_value_of("kv_layout")),
    "kv_cache_form": optional(is_value_of("kv_cache_form")),
    "kv_cache_dtype": is_value_of("kv_cache_dtype"),
    "cudagraph": is_value_of("cudagraph"),
    "options": table_of(is_option),
    "block_sizes": optional(is_list),
    "reads_lengths": is_flag,
}
