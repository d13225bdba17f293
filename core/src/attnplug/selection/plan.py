"""One decision for a whole model: groups of layers that share a backend, the terms of the KV cache and a plan."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterator, Mapping, Sized
from textwrap import wrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from attnplug._columns import WIDEST, width
from attnplug._escape import escaped
from attnplug._html import block, table
from attnplug.errors import RequirementsError, UnknownLayerError, near, shown
from attnplug.negotiation.received import check_received, is_list, is_table, is_text, list_of, refuse_received
from attnplug.request.domains import GRAPH_LEVELS
from attnplug.request.requirements import Requirements
from attnplug.selection.deciding import Kind, assign, by_request, drafted_tokens, nothing_common, with_draft
from attnplug.selection.explanation import describe
from attnplug.selection.scope import overrides
from attnplug.selection.select import context, evaluate_all, explain_choice, log_decision, no_backend
from attnplug.selection.selection import Selection

if TYPE_CHECKING:
    from attnplug.manifest.constraint import Constraint
    from attnplug.negotiation.evaluation import Evaluation
    from attnplug.request.settings import BackendNames, Options
    from attnplug.request.torch_values import DeviceLike
    from attnplug.selection.process import ProcessState


@frozen
class Group:
    """
    Layers with the same backend, agreement and plan arguments: loaded once, their metadata built once a step.

    Attributes:
        layers: Names of the layers, in the model's order.
        selection: The decision for all of them.
    """

    layers: tuple[str, ...]
    selection: Selection

    def __repr__(self) -> str:
        return f"<Group: {_count(self.layers, 'layer')} on {self.selection.id}>"


@frozen
class Plan:
    """
    The decision for every layer of a model. Printing it gives a table.

    ``plan[layer]`` is the decision for one layer, ``len(plan)`` the number of layers, and iterating over it gives their
    names. A group's layers share one backend: load each group once, with ``group.selection.load()``.

    Attributes:
        groups: The groups; the one with most layers first.
        notes: The measured time of all layers, and of what was compared with it; or why it is not compared. Empty
            without a profile.
    """

    groups: tuple[Group, ...]
    notes: tuple[str, ...] = ()
    _by_layer: Mapping[str, Selection] = field(init=False, repr=False, eq=False)

    @_by_layer.default
    def _index(self) -> Mapping[str, Selection]:
        return MappingProxyType({layer: group.selection for group in self.groups for layer in group.layers})

    def __getitem__(self, layer: str) -> Selection:
        """
        Return the decision for a layer.

        Raises:
            UnknownLayerError: The plan is not for this layer.
        """
        try:
            return self._by_layer[layer]
        except KeyError:
            raise _unknown(layer, tuple(self)) from None

    def __contains__(self, layer: object) -> bool:
        return layer in self._by_layer

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_layer)

    def __len__(self) -> int:
        return len(self._by_layer)

    def __repr__(self) -> str:
        used = ", ".join(dict.fromkeys(group.selection.id for group in self.groups)) or "no backend"
        return f"<Plan: {_count(self, 'layer')} in {_count(self.groups, 'group')} on {used}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the common terms, and a row for each group."""
        rows = [
            (
                (_count(group.layers, "layer"), reprlib.repr(group.layers)),
                group.selection.id,
                tuple(line.strip() for line in describe(group.selection, WIDEST)),
            )
            for group in self.groups
        ]
        lines = itertools.takewhile(bool, self._lines(WIDEST))  # up to the first group
        return block(repr(self)[1:-1], lines, table(("layers", "backend", "decision"), rows))

    def __str__(self) -> str:
        return "\n".join(map(escaped, self._lines(min(width(), WIDEST))))

    def _lines(self, width: int) -> Iterator[str]:
        yield f"layers: {len(self)} in {_count(self.groups, 'group')}"
        if self.groups:
            yield f"device: {self.groups[0].selection.device}"
            size = self.block_size if self.block_sizes is None else f"({self.block_sizes})"
            terms = f"block_size={size} kv_layout={self.kv_layout} kv_cache_form={self.kv_cache_form}"
            yield f"common: {terms} cudagraph={self.cudagraph}"
        for note in self.notes:
            yield from wrap(note, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for group in self.groups:
            yield ""
            names = f"{_count(group.layers, 'layer')}: {', '.join(group.layers)}"
            yield from wrap(names, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
            yield from describe(group.selection, width)

    @property
    def block_size(self) -> int | None:
        """Tokens per cache block, common to all layers with a paged cache; None while it is late."""
        size: int | None = self._common("block_size")
        return size

    @property
    def kv_layout(self) -> str | None:
        """The layout of the cache, common likewise."""
        layout: str | None = self._common("kv_layout")
        return layout

    @property
    def kv_cache_form(self) -> str | None:
        """The form of the cache, common likewise."""
        form: str | None = self._common("kv_cache_form")
        return form

    def _common(self, term: str) -> Any:
        """Return a term of the layers with a paged cache; None where there are none."""
        values = (getattr(selection.agreement, term) for selection in self._by_layer.values())
        return next((value for value in values if value is not None), None)

    @property
    def cudagraph(self) -> str:
        """The graph level that every group reaches: one weak group lowers the whole model."""
        return min((group.selection.agreement.cudagraph for group in self.groups), key=GRAPH_LEVELS.index)

    @property
    def weakest(self) -> Group:
        """The group that sets the graph level."""
        return min(self.groups, key=lambda group: GRAPH_LEVELS.index(group.selection.agreement.cudagraph))

    @property
    def block_sizes(self) -> Constraint | None:
        """The block sizes that all layers with a paged cache serve, while their block size is late; else None."""
        return next(
            (s.agreement.block_sizes for s in self._by_layer.values() if s.agreement.block_sizes is not None), None
        )

    def bind(
        self, *, block_size: int | None = None, num_q_heads: int | None = None, num_kv_heads: int | None = None
    ) -> Plan:
        """
        Settle late fields for all layers at once: each group binds those of them that are late in it.

        Args:
            block_size: Tokens per KV-cache block; None leaves it late.
            num_q_heads: Query heads of this rank, likewise.
            num_kv_heads: Key and value heads of this rank, likewise.

        Returns:
            The plan with the same backends, whose layers still share one block size and one layout.

        Raises:
            NotNegotiatedError: A group's candidate refuses the values, or no layout serves all groups with them.
            RequirementsError: A field is late in no group, or a value is invalid.
            PluginLoadError: A candidate is not here as it was decided on.
        """
        from attnplug.selection.binding import bind_selections  # noqa: PLC0415 - it finds installed plugins

        values = {"block_size": block_size, "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads}
        bound = bind_selections([group.selection for group in self.groups], values)
        groups = tuple(Group(g.layers, selection) for g, selection in zip(self.groups, bound, strict=True))
        return Plan(groups, self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "groups": [{"layers": list(group.layers), "selection": group.selection.to_dict()} for group in self.groups],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """
        Read what `to_dict` wrote.

        Raises:
            DecisionError: It is something else.
        """
        check_received("a plan", data, {"groups": is_list, "notes": list_of(is_text)})
        for group in data["groups"]:
            check_received("a group", group, {"layers": list_of(is_text), "selection": is_table})
        names = [name for group in data["groups"] for name in group["layers"]]
        if not all(group["layers"] for group in data["groups"]) or len(set(names)) < len(names):
            refuse_received(f"the layers {shown(names)}: a group without any, or one that is in two groups")
        return cls(
            tuple(Group(tuple(group["layers"]), Selection.from_dict(group["selection"])) for group in data["groups"]),
            tuple(data["notes"]),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.from_dict, (self.to_dict(),)


def _count(items: Sized, noun: str) -> str:
    return f"{len(items)} {noun}{'s' * (len(items) != 1)}"


def plan(
    layers: Mapping[str, Requirements],
    device: DeviceLike | None = None,
    *,
    draft: Mapping[str, Requirements] | None = None,
    backend: BackendNames | None = None,
    options: Options | None = None,
    assume_installed: bool = False,
) -> Plan:
    """
    Choose for all layers of a model together.

    All layers with a paged KV cache share one block size, one layout and one form. Where a profile has the times of
    every candidate that could be chosen, their sum over all layers is the least; another backend or variant in the same
    phase has to lower it by more than 5 %. Else every layer gets the best backend by rank, and where these share no
    terms, the groups with fewer layers take their next best.

    Args:
        layers: The requirements of each layer, by name.
        device: As for `select`.
        draft: The same of a draft model, whose layers share the KV cache: in the plan their names begin with
            ``draft.``. In a decode they count once for each drafted token, `decode_query_len` - 1.
        backend: As for `select`.
        options: As for `select`.
        assume_installed: Suppose that the kernel libraries that installed plugins require are there, as for `explain`.
            Such a plan says what would be; loading it still needs the libraries.

    Raises:
        NoBackendError: A layer cannot be served, or no choice gives a common block size and layout.
        RequirementsError: `layers` or `draft` is empty, or their KV caches have different dtypes.
    """
    return decide(layers, device, draft=draft, backend=backend, options=options, assume_installed=assume_installed).plan


@frozen(eq=False)
class Decided:
    """
    A plan with what it was decided on.

    Attributes:
        plan: The plan.
        kinds: The kinds of layers; the one with most layers first.
        picks: The evaluation of the chosen candidate of each kind.
        state: The state of the process that was decided under.
        assume_installed: Whether missing kernel libraries were supposed to be there.
    """

    plan: Plan
    kinds: tuple[Kind, ...]
    picks: tuple[Evaluation, ...]
    state: ProcessState
    assume_installed: bool


def decide(
    layers: Mapping[str, Requirements],
    device: DeviceLike | None = None,
    *,
    draft: Mapping[str, Requirements] | None = None,
    backend: BackendNames | None = None,
    options: Options | None = None,
    assume_installed: bool = False,
) -> Decided:
    """Return a plan with what it was decided on; arguments and errors as for `plan`."""
    _check_layers(layers)
    if draft is not None:
        _check_layers(draft)
    state, where, settings = context(overrides("the call", backend, options, device))
    whole, drafted = with_draft(layers, draft), drafted_tokens(layers) if draft else 1
    # Every request is ranked by itself first; then common terms may move the smaller groups to their next best.
    kinds = tuple(
        Kind(names, evaluate_all(state, request, assume_installed=assume_installed), drafted)
        for request, names in by_request(whole, where, settings).items()
    )
    for kind in kinds:
        if not kind.found.ranked.evaluations:
            raise no_backend(explain_choice(kind.found), settings, layer=kind.names[0])
    assigned = assign(kinds)
    if assigned is None:
        raise nothing_common(kinds)
    explanations = [
        explain_choice(kind.found, pick, assigned.because) for kind, pick in zip(kinds, assigned.picks, strict=True)
    ]
    for explanation in explanations if not assume_installed else ():
        log_decision(explanation)
    groups = tuple(
        Group(kind.names, e.chosen) for kind, e in zip(kinds, explanations, strict=True) if e.chosen is not None
    )
    return Decided(Plan(groups, assigned.notes), kinds, assigned.picks, state, assume_installed)


def _check_layers(layers: Mapping[str, Requirements]) -> None:
    if not isinstance(layers, Mapping) or not all(
        isinstance(name, str) and isinstance(each, Requirements) for name, each in layers.items()
    ):
        raise RequirementsError(
            f"layers={reprlib.repr(layers)} was given",
            "a plan is for the layers of one model, by name: {layer name: Requirements}",
            "build a Requirements for each layer",
        )
    if not layers:
        raise RequirementsError(
            "no layers were given", "a plan is for the layers of one model", "pass {layer name: Requirements}"
        )


def _unknown(layer: object, layers: tuple[str, ...]) -> UnknownLayerError:
    shown = ", ".join(map(repr, layers[:8])) + (f" and {len(layers) - 8} more" if len(layers) > 8 else "")
    return UnknownLayerError(
        f"the layer {reprlib.repr(layer)} was requested{near(str(layer), layers)}",
        f"the plan is for {shown}",
        "name one of these; iterating over a plan gives them all",
    )
