"""``attnplug plan``: the decision for a whole model, its KV cache, and what tensor parallelism does with its heads."""

from __future__ import annotations

import argparse
from shlex import quote
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.cli.device_report import report_device
from attnplug.cli.explain.request import (
    add_field_options,
    given_fields,
    note_float32,
    requested_devices,
    requested_options,
)
from attnplug.cli.explain.result import explain_groups
from attnplug.cli.explain.short import prefill_lines
from attnplug.commands import NO, OK, abbreviated, describe_error, escaped, say, say_json, wrapped
from attnplug.errors import NoBackendError, RequirementsError
from attnplug.models.description import describe_model
from attnplug.models.draft import describe_draft
from attnplug.models.parallel import cache_bytes, kept_tokens, shard
from attnplug.request.domains import Table
from attnplug.request.fields import FIELDS
from attnplug.selection.deciding import DRAFT
from attnplug.selection.limits import limits_of
from attnplug.selection.plan import decide

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug.cli.explain.result import LayerGroup
    from attnplug.models.description import ModelDescription
    from attnplug.models.layers import ModelLayer
    from attnplug.models.parallel import Shard
    from attnplug.request.device import Device
    from attnplug.request.field import Field
    from attnplug.request.requirements import Requirements
    from attnplug.selection.limits import Change, Limit
    from attnplug.selection.plan import Plan

_EPILOG: Final = """\
examples:
  attnplug plan path/to/config.json
  attnplug plan Qwen/Qwen3-8B --tp 2 --device cuda:9.0 --assume-installed
  attnplug plan path/to/model --draft path/to/eagle --decode-query-len 4 --tp 2
  attnplug plan path/to/folder --dtype bfloat16 --kv-cache-dtype fp8_e4m3 --block-size 16

exit codes: 0 all attention layers can be served, 1 some cannot, 2 the request is wrong
"""
_COMMAND: Final = "more: attnplug "
_TERMS: Final = ("block_size", "kv_layout", "kv_cache_form", "cudagraph")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Plan the attention of a whole model: per group of layers the decision, the terms of the KV cache that they\n"
        "share and its bytes per token, on each device of a tensor-parallel group. Nothing of a plugin is imported."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "config", metavar="CONFIG", help="a model's config.json, its folder, or a model id in the Hugging Face cache"
    )
    parser.add_argument(
        "--tp", type=int, default=1, metavar="N", help="devices of the tensor-parallel group; default 1"
    )
    parser.add_argument(
        "--draft",
        metavar="CONFIG",
        help="a draft model that shares the KV cache, as CONFIG; CONFIG itself for its own MTP layers",
    )
    parser.add_argument("--assume", metavar="TYPE", help="read an unknown model type as this one, such as llama")
    parser.add_argument("--device", action="append", metavar="DEVICE", help="as for explain; repeatable")
    parser.add_argument(
        "--assume-installed", action="store_true", help="suppose that the kernel libraries of plugins are installed"
    )
    parser.add_argument("--backend", action="append", metavar="NAME", help="as for explain; repeatable")
    parser.add_argument("--option", action="append", metavar="BACKEND.OPTION=VALUE", help="as for explain; repeatable")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--dtype", default=argparse.SUPPRESS, metavar="NAME", help="dtype of query, key and value, such as bfloat16"
    )
    add_field_options(parser, ("engine",))


def run(arguments: argparse.Namespace) -> int:
    """Plan, on each device."""
    fields = {"paged": True, **given_fields(arguments)}
    model = describe_model(arguments.config, assume=arguments.assume, **fields)
    draft = describe_draft(arguments.draft, model, **fields) if arguments.draft is not None else None
    keywords = {"backend": arguments.backend, "options": requested_options(arguments.option)}
    devices = requested_devices(arguments.device) or (report_device().device,)
    note_float32(model.requirements.values(), devices, fields)
    plans = [
        plan_model(model, device, arguments.tp, draft, assume_installed=arguments.assume_installed, **keywords)
        for device in devices
    ]
    if arguments.json:
        own = {"draft": draft.to_dict()} if draft is not None else {}
        say_json({"model": model.to_dict(), **own, "plans": [each.to_dict() for each in plans]})
    else:
        _show(model, plans, assume_installed=arguments.assume_installed)
    return OK if all(each.serves for each in plans) else NO


@frozen
class ModelPlan:
    """
    The decision for a model on one kind of device.

    Attributes:
        model: The model.
        device: The device.
        shards: Each attention layer on one device of the tensor-parallel group, by name.
        size: The devices of the group.
        decided: The decision; None where there is no layer that a backend can serve, or no decision for all of them.
        failure: Why there is none, though there are layers.
        prefills: The uncompressed prefills of layers with latents on one device, with the decision for each kind.
        draft: The draft model, whose layers' names begin with ``draft.``.
        limits: The layers that limit the others.
    """

    model: ModelDescription
    device: Device
    shards: Mapping[str, Shard]
    size: int
    decided: Plan | None
    failure: NoBackendError | None
    prefills: tuple[LayerGroup, ...] = ()
    draft: ModelDescription | None = None
    limits: tuple[Limit, ...] = ()

    @property
    def serves(self) -> bool:
        """Whether every layer that is attention can be served."""
        unserved = any(part.unserved for part in (self.model, self.draft) if part is not None)
        return self.decided is not None and not unserved

    @property
    def layers(self) -> dict[str, ModelLayer]:
        """The attention layers of both models, by name."""
        return _named(self.model, self.draft)

    def groups(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield layers that request the same and have the same backend, with that candidate."""
        for group in self.decided.groups if self.decided is not None else ():
            alike: dict[object, list[str]] = {}
            for name in group.layers:
                alike.setdefault((self.shards[name].requirements, name.startswith(DRAFT)), []).append(name)
            yield from ((tuple(names), group.selection.id) for names in alike.values())

    def bytes_per_token(self, names: tuple[str, ...] | None = None) -> int | None:
        """Return the bytes of one token in the KV cache of these layers, or all, on one device; None: not known."""
        sizes = [cache_bytes(self.shards[name].requirements) for name in names or self.shards]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        found: dict[str, Any] = {"device": self.device.to_dict(), "tensor_parallel": self.size, "serves": self.serves}
        if self.failure is not None:
            found["error"] = describe_error(self.failure)
        if self.decided is not None:
            found |= {name: getattr(self.decided, name) for name in _TERMS}
            found["kv_cache_bytes_per_token"] = self.bytes_per_token()
            found["groups"] = [self._group(names, id_) for names, id_ in self.groups()]
            found["notes"] = list(self.decided.notes)
            found["limits"] = [limit.to_dict() for limit in self.limits]
        if self.prefills:
            found["uncompressed_prefills"] = [_of_prefill(group) for group in self.prefills]
        return found

    def scales(self, names: tuple[str, ...]) -> set[float | None]:
        """Return the factors of the scores of these layers."""
        layers = self.layers
        return {layers[name].scale for name in names}

    def _group(self, names: tuple[str, ...], id_: str) -> dict[str, Any]:
        first = self.shards[names[0]]
        scales = self.scales(names)
        return {
            "layers": list(names),
            "id": id_,
            "requirements": first.requirements.to_dict(),
            "scale": scales.pop() if len(scales) == 1 else None,
            "kv_heads": first.sharing,
            "copies": first.copies,
            "kv_cache_bytes_per_token": self.bytes_per_token(names),
            "tokens_kept": kept_tokens(first.requirements),
        }


def plan_model(
    model: ModelDescription,
    device: Device,
    size: int = 1,
    draft: ModelDescription | None = None,
    *,
    assume_installed: bool = False,
    **keywords: Any,
) -> ModelPlan:
    """
    Decide for a whole model on one kind of device.

    Args:
        model: The model.
        device: Each device of the tensor-parallel group.
        size: How many they are.
        draft: A draft model on the same devices, with the same tensor parallelism.
        assume_installed: Suppose that the kernel libraries that installed plugins require are there.
        keywords: ``backend`` and ``options``, as for `attnplug.plan`.

    Raises:
        RequirementsError: `size` does not divide the heads.
    """
    layers = _named(model, draft)
    shards = {name: _shard(name, layer.requirements, size) for name, layer in layers.items()}
    uncompressed = {
        name: shard(layer.uncompressed, size).requirements
        for name, layer in layers.items()
        if layer.uncompressed is not None
    }
    prefills = explain_groups(uncompressed, device, assume_installed=assume_installed, **keywords)
    requests = {name: each.requirements for name, each in shards.items()}
    own = {name: requests[name] for name in model.requirements}
    drafting = {name: requests[f"{DRAFT}{name}"] for name in draft.requirements} if draft is not None else {}
    decided: Plan | None = None
    failure: NoBackendError | None = None
    limits: tuple[Limit, ...] = ()
    if own:
        try:
            found = decide(own, device, draft=drafting or None, assume_installed=assume_installed, **keywords)
        except NoBackendError as error:
            failure = error
        else:
            decided, limits = found.plan, limits_of(found)
    return ModelPlan(model, device, shards, size, decided, failure, prefills, draft, limits)


def _named(model: ModelDescription, draft: ModelDescription | None) -> dict[str, ModelLayer]:
    found = {layer.name: layer for layer in model.layers}
    return found | {f"{DRAFT}{layer.name}": layer for layer in (draft.layers if draft is not None else ())}


def _shard(name: str, requirements: Requirements, size: int) -> Shard:
    try:
        return shard(requirements, size)
    except RequirementsError as error:
        if not name.startswith(DRAFT):
            raise
        expected = f"the draft has the tensor parallelism of the model: {error.expected}"
        raise RequirementsError(f"of the draft, {error.problem}", expected, error.fix) from error


def _of_prefill(group: LayerGroup) -> dict[str, Any]:
    chosen = group.explanation.chosen
    return {
        "layers": list(group.layers),
        "id": chosen.id if chosen else None,
        "requirements": group.explanation.requirements.to_dict(),
    }


# What a person reads


def _show(model: ModelDescription, plans: list[ModelPlan], *, assume_installed: bool) -> None:
    _say(f"{model.origin}: {model.model_type}, {_count(len(model.layers), 'attention layer')}")
    for note in model.notes:
        _say(f"note: {note}")
    for other in model.others:
        _say(f"{'not served' if other.is_attention else 'other layers'}: {other}")
    draft = plans[0].draft
    if draft is not None:
        _say(f"draft {draft.origin}: {draft.model_type}, {_count(len(draft.layers), 'attention layer')}")
        for note in draft.notes:
            _say(f"note: draft: {note}")
        for other in draft.others:
            _say(f"{'not served' if other.is_attention else 'other layers'}: draft: {other}")
    for each in plans:
        say()
        parallel = f", tensor parallelism over {each.size}" if each.size > 1 else ""
        assumed = ", kernel libraries assumed installed" if assume_installed else ""
        _say(f"device: {each.device}{parallel}{assumed}")
        for line in _lines(each):
            if line.startswith(_COMMAND):
                say(line)  # whole, to be copied
            else:
                _say(line)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _say(line: str) -> None:
    text = line.lstrip(" ")
    say("\n".join(wrapped(text, line[: len(line) - len(text)])))


def _lines(found: ModelPlan) -> Iterator[str]:
    if found.decided is None:
        yield "plan: none"
        yield from _why_none(found)
        yield from map("".join, prefill_lines(found.prefills))
        return
    terms = " ".join(f"{name}={getattr(found.decided, name)}" for name in _TERMS)
    yield f"plan: {terms}"
    yield from found.decided.notes
    for names, id_ in found.groups():
        yield f"  {id_}  {abbreviated(names)}"
        yield f"    {_heads(found, names)}{_features(found, names)}"
    for limit in found.limits:
        yield from _limit(limit)
    yield from _memory(found)
    yield from map("".join, prefill_lines(found.prefills))


def _limit(limit: Limit) -> Iterator[str]:
    changes = "; ".join(map(_changed, limit.changes))
    yield f"limited by {abbreviated(limit.layers)}; without: {changes}"
    yield f"  to lift it: {'; or '.join(limit.lifts)}" if limit.lifts else "  no candidate that is known here lifts it"


def _changed(change: Change) -> str:
    if change.term == "backend":
        return f"{change.without} instead of {change.value} for {abbreviated(change.layers)}"
    return f"{change.term}={change.without} instead of {change.value}"


def _why_none(found: ModelPlan) -> Iterator[str]:
    """Yield the problem, and the command that has every candidate with its reason; without one, the whole error."""
    failure = found.failure
    if failure is None:
        return
    if failure.explanation is None:
        yield from map(escaped, str(failure).splitlines())
        return
    yield f"  {escaped(failure.problem)}"
    device = str(found.device).partition(" (")[0]  # without the product
    yield f"{_COMMAND}explain --config {escaped(quote(str(found.model.origin)))} --device {device}"


def _heads(found: ModelPlan, names: tuple[str, ...]) -> str:
    one = found.shards[names[0]]
    own = one.requirements
    text = f"heads: {own.num_q_heads} query and {own.num_kv_heads} KV of size {own.head_size}"
    if one.sharing == "split":
        return f"{text} on each device: query and KV heads are split"
    if one.sharing == "replicated":
        return f"{text} on each device: query heads are split, each KV head is on {one.copies} devices"
    return text


def _features(found: ModelPlan, names: tuple[str, ...]) -> str:
    own = found.shards[names[0]].requirements
    requested = ((FIELDS[name], value) for name, value in own.requested())
    shown = [_shown(item, value) for item, value in requested if item.kind == "model" and not item.required]
    scales = found.scales(names) - {None, own.head_size**-0.5}
    shown += [f"scale={scale:.6g}" for scale in scales if scale is not None] if len(scales) == 1 else []
    return f"; {', '.join(shown)}" if shown else ""


def _shown(item: Field, value: Any) -> str:
    if item.name == "attn_type":
        return str(value)
    return item.name if value is True or isinstance(item.domain, Table) else f"{item.name}={value}"


def _memory(found: ModelPlan) -> Iterator[str]:
    whole = found.bytes_per_token()
    dtypes = sorted({s.requirements.kv_cache_dtype for s in found.shards.values() if s.requirements.paged})
    if not dtypes:
        yield "KV cache: none, K/V are contiguous"
        return
    if whole is None:
        yield f"KV cache in {', '.join(dtypes)}: the plugin decides its size"
        return
    yield f"KV cache in {', '.join(dtypes)}: {whole:,} bytes per token per device"
    for bound in sorted({b for s in found.shards.values() if (b := kept_tokens(s.requirements)) is not None}):
        names = tuple(n for n, s in found.shards.items() if kept_tokens(s.requirements) == bound)
        size = found.bytes_per_token(names)
        yield f"  {size:,} of these for the last {bound:,} tokens only, if the engine frees older ones"
    cross = tuple(n for n, s in found.shards.items() if s.requirements.attn_type == "encoder_decoder")
    if cross:
        yield f"  {found.bytes_per_token(cross):,} of these per token of the encoder, for cross attention"
