"""
`load`: import the chosen plugin, check it, call its probe, and make the backend; select again where that fails.

A plugin's probe is called after the import, for what no metadata can say. The code of its reason says how far a refusal
goes: this request on this device, every request on this device, or everything.
"""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from attnplug._foreign import ForeignCode, shortened
from attnplug.discovery.plugin import BY_HAND
from attnplug.errors import (
    AttnplugError,
    NoBackendError,
    NotNegotiatedError,
    PluginContractError,
    PluginError,
    PluginLoadError,
    RequirementsError,
    SettingsError,
)
from attnplug.negotiation.candidate import CACHE_TERMS, TERMS
from attnplug.negotiation.matching import Request, negotiate
from attnplug.negotiation.pair import keeps_terms
from attnplug.negotiation.probe_refusals import ProbeRefusal
from attnplug.negotiation.ranking import AUTO
from attnplug.negotiation.reason import Reason
from attnplug.request.device import is_unseen
from attnplug.request.requirements import Requirements
from attnplug.selection.process import current_state, registry
from attnplug.selection.scope import overrides
from attnplug.selection.select import context, select
from attnplug.selection.selection import Selection

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from attnplug.contract.loaded import LoadedBackend
    from attnplug.contract.vendor import Backend
    from attnplug.discovery.plugin import Plugin
    from attnplug.negotiation.candidate import Candidate
    from attnplug.request.settings import BackendNames, Options
    from attnplug.request.torch_values import DeviceLike

_log: Final = logging.getLogger("attnplug")


def load(
    requirements: Requirements | Selection,
    device: DeviceLike | None = None,
    *,
    backend: BackendNames | None = None,
    options: Options | None = None,
) -> LoadedBackend:
    """
    Select, import, probe; select again without a candidate that failed, until one loads. Arguments as for `select`.

    A backend named alone is never replaced: its failure is raised. So is any failure under the strict setting.

    A decision that was made before, a `Selection`, is loaded exactly as it is: ``load(selection)`` is
    ``selection.load()``.

    Returns:
        The backend; its ``selection`` is the outcome.

    Raises:
        RequirementsError: A decision was given with keywords that could change it.
        NotNegotiatedError: Fields are late: they are bound first.
        NoBackendError: Nothing can serve, or everything that could has failed to load.
        PluginError: The one named backend, or any under the strict setting, failed to load; or torch does not import.
    """
    if isinstance(requirements, Selection):
        _check_decided(requirements, device=device, backend=backend, options=options)
        return load_selection(requirements)
    if isinstance(requirements, Requirements):
        _check_bound("a backend for these requirements", requirements.late)
    if is_unseen():
        _import_contract("a backend")  # loading imports torch anyway, and now it can see the GPU
    failure: PluginError | None = None
    failed: set[str] = set()
    while True:  # each failure is recorded in the registry, so that the next selection is another one
        try:
            selection = select(requirements, device, backend=backend, options=options)
        except NoBackendError as error:
            raise error from failure
        _import_contract(repr(selection.id))  # every backend needs it: to select another one would not help
        try:
            return load_selection(selection)
        except PluginError as error:
            failure = error
            settings = context(overrides("the call", backend, options, device))[2]
            alone = len(settings.backend) == 1 and AUTO not in settings.backend
            # The same one twice: its refusal was not found again, since an option is NaN, which equals nothing.
            if settings.strict or alone or selection.id in failed:
                raise
            failed.add(selection.id)
            _log.warning("%s failed to load and is left out: %s", selection.id, error)


def _check_decided(selection: Selection, **keywords: object) -> None:
    """Refuse keywords for a decision that was made without them."""
    given = [name for name, value in keywords.items() if value is not None]
    if given:
        raise RequirementsError(
            f"the decision for {selection.id!r} was to be loaded with {' and '.join(given)}",
            "a decision is loaded exactly as it was made",
            f"leave {' and '.join(given)} out, or load selection.requirements to decide again",
        )


def _check_bound(what: str, late: tuple[str, ...]) -> None:
    """Refuse to load what has late fields: a backend is constructed from a complete agreement."""
    if late:
        arguments = ", ".join(f"{name}=..." for name in late)
        raise NotNegotiatedError(
            f"{what} was to be loaded with late={late}",
            "a backend is loaded for a complete agreement; until then agreement.block_sizes says what it takes",
            f"bind them first: select(requirements).bind({arguments}).load()",
        )


def load_selection(selection: Selection) -> LoadedBackend:
    """
    Load exactly this decision, which may come from another process.

    A failure marks the candidate as broken in this process, so that no later selection picks it. What its probe refuses
    is remembered as far as the probe's reason goes: later selections of that, and of nothing else, leave it out.

    Raises:
        NotNegotiatedError: Fields are late.
        PluginLoadError: The plugin is not here as it was decided on, does not import, or its probe refuses.
        PluginContractError: It does not keep the contract.
    """
    _check_bound(f"the decision for {selection.id!r}", selection.late)
    if selection.roles:
        return _load_pair(selection)
    plugin = _same_plugin(selection)
    _import_contract(repr(selection.id))
    try:
        # Each step names its own failures; code of the plugin runs between them too.
        with ForeignCode(f"loading {selection.id!r} raised", _failed, passing=(PluginError,)):
            outcome = _load_here(plugin, selection)
    except PluginError as error:
        _mark_broken(selection, error)
        raise
    if isinstance(outcome, PluginLoadError):
        raise outcome
    return outcome


def _load_pair(selection: Selection) -> LoadedBackend:
    """
    Load both candidates of a routed pair, and the backend that routes to them.

    Raises:
        PluginLoadError: Their classes do not agree on what they share, which no manifest says.
    """
    if not keeps_terms(selection.agreement):
        raise PluginLoadError(
            f"{selection.id!r} was selected on terms that do not follow from those of its candidates",
            "",
            "select again in this process",
        )
    decode, rest = (load_selection(one) for one in selection.roles.values())
    from attnplug.contract.loaded import LoadedBackend  # noqa: PLC0415 - the contract imports torch
    from attnplug.contract.routed import route_pair  # noqa: PLC0415 - likewise

    made = route_pair(selection.agreement, selection.device, decode, rest)
    if isinstance(made, str):
        error = PluginLoadError(
            f"the pair {selection.id!r} cannot be loaded: {made}", "", f"name {rest.id!r} alone, or another pair"
        )
        _mark_broken(selection, error)
        raise error
    forms = tuple(form for form in decode.kv_cache_forms if form in rest.kv_cache_forms)
    return LoadedBackend(made, selection, forms, current_state().settings.record)


def _load_here(plugin: Plugin, selection: Selection) -> LoadedBackend | PluginLoadError:
    """Load a plugin; return the error where its probe refuses, which is recorded, and breaks nothing else of it."""
    manager = _register(_import(plugin), plugin)
    refusal = probe(manager, selection)
    if refusal is None:
        return _construct(_backend_class(manager, selection), selection)
    refused = _refused(selection, refusal)  # printed before it is recorded: its values are the plugin's objects
    registry().mark_refused(selection.id, refusal)
    return refused


_failed: Final = partial(PluginLoadError, expected="", fix="repair the plugin, or block it")


def _mark_broken(selection: Selection, error: PluginError) -> None:
    registry().mark_broken(selection.id, Reason("broken", selection.id, None, error.problem, error.expected))


def _shown(value: object) -> str:
    """Return the repr of a plugin's object, which may raise anything."""
    text = ""
    with ForeignCode("an object whose repr() raises") as code:
        text = shortened(repr(value), 1000)
    return code.problem or text


def probe(manager: Any, selection: Selection) -> ProbeRefusal | None:
    """
    Call the plugin's probe for a decision; return what it refuses, or None where it refuses nothing or there is none.

    Args:
        manager: The plugin's own manager of hooks.
        selection: The decision.

    Raises:
        PluginLoadError: The probe raised something.
        PluginContractError: It returned neither a reason nor None.
    """
    agreement, device = selection.agreement, selection.device
    with ForeignCode(f"the probe of {selection.id!r} raised", _failed):
        reason = manager.hook.attnplug_probe(variant=selection.variant, agreement=agreement, device=device)
    if reason is None:
        return None
    if not isinstance(reason, Reason):
        raise PluginContractError(
            f"the probe of {selection.id!r} returned {_shown(reason)}", "", "return None, or an attnplug Reason"
        )
    return ProbeRefusal.of(reason, agreement, device)


def _refused(selection: Selection, refusal: ProbeRefusal) -> PluginLoadError:
    """Return the error for a decision that the plugin's probe refuses."""
    if refusal.agreement is not None:
        values = selection.requirements.to_dict().items()
        subject = f"{' '.join(f'{name}={value}' for name, value in values)} on {selection.device}"
    else:
        subject = str(selection.device) if refusal.device is not None else "this machine"
    return PluginLoadError(f"the probe of {selection.id!r} refuses {subject}: {refusal.finding}", "", refusal.fix)


def _import_contract(what: str) -> None:
    with ForeignCode("does not import:") as code:
        import_module("attnplug.contract.loaded")
    if code.error is not None:
        absent = isinstance(code.error, ModuleNotFoundError) and code.error.name == "torch"
        raise PluginLoadError(
            f"{what} cannot be loaded: the contract needs torch, which"
            f" {'is not installed' if absent else code.problem}",
            "",
            "pip install 'attnplug[torch]'" if absent else _torch_fix(code.error),
        ) from code.error


def _torch_fix(error: BaseException) -> str:
    # torch reads the entry points of everything installed, and stops at the first odd one.
    if isinstance(error, (TypeError, ValueError)):
        return (
            "repair what is installed beside it: torch reads every entry_points.txt, and `attnplug doctor` names those"
            " that cannot be read; TORCH_DEVICE_BACKEND_AUTOLOAD=0 makes torch read none"
        )
    return "repair the installation of torch"


def _same_plugin(selection: Selection) -> Plugin:
    """Return the plugin here, which is the one that was decided on and agrees to the same terms."""
    plugin, candidate = same_candidate(selection)
    if candidate.refusals is not None:
        refusal = candidate.refusals.find(selection.agreement, selection.device)
        if refusal is not None:
            raise _refused(selection, refusal)
    agreed = {name: getattr(selection.agreement, name) for name in CACHE_TERMS}
    outcome = negotiate(candidate, Request(selection.requirements, selection.device), agreed)
    reasons = (*candidate.reasons, *outcome.objections)
    if reasons:
        raise PluginLoadError(
            f"{selection.id!r} cannot serve here: {'; '.join(map(str, reasons))}", "", "select again in this process"
        )
    _check_terms(selection, candidate, outcome.terms)
    return plugin


def same_candidate(selection: Selection) -> tuple[Plugin, Candidate]:
    """
    Return the plugin and the candidate of a decision, of the same distribution and version.

    Raises:
        PluginLoadError: It is not here, or may not be used here.
    """
    try:
        plugin = registry().plugin(selection.backend)
    except AttnplugError as error:
        raise PluginLoadError(
            f"{selection.id!r} is not installed here: {error.problem}",
            error.expected,
            "call attnplug.register in this process too"
            if selection.distribution == BY_HAND
            else f"install {selection.distribution or 'it'}",
        ) from error
    candidates = registry().candidates(current_state().settings)
    candidate = next((c for c in candidates if c.id == selection.id), None)
    wanted, here = selection.distribution, candidate.distribution if candidate else ""
    # Ranks with different versions of a plugin would run different kernels in one model.
    if candidate is None or (wanted and wanted != here):
        raise PluginLoadError(
            f"{selection.id!r} of {wanted!r} was selected, and {here or plugin.distribution!r} is installed here",
            "",
            "install the same version, or register the same module, on every rank",
        )
    if candidate.availability in ("refused", "broken"):
        reasons = "; ".join(map(str, candidate.reasons))
        raise PluginLoadError(f"{selection.id!r} may not be used here: {reasons}", "", candidate.fix or "select again")
    return plugin, candidate


def _check_terms(selection: Selection, candidate: Candidate, terms: Mapping[str, Any]) -> None:
    """Check that the candidate would agree here to exactly what was agreed on there."""
    agreed, wanted = selection.agreement, selection.requirements
    origins = dict.fromkeys(agreed.options, "the decision")
    try:
        options = candidate.manifest.read_options(agreed.options, origins) if candidate.manifest else {}
    except SettingsError as error:
        raise PluginLoadError(
            f"{selection.id!r} cannot be loaded here: {error.problem}", error.expected, error.fix
        ) from error
    all_of_cache = " and ".join(CACHE_TERMS)
    here = {
        all_of_cache: bool(wanted.paged),
        **terms,
        **{name: getattr(wanted, name) or terms[name] for name in CACHE_TERMS},
        "kv_cache_dtype": wanted.kv_cache_dtype,
        "options": options,
    }
    there = {
        all_of_cache: None not in (agreed.block_size, agreed.kv_layout, agreed.kv_cache_form),
        **{name: getattr(agreed, name) for name in TERMS},
        "kv_cache_dtype": agreed.kv_cache_dtype,
        "options": dict(agreed.options),
    }
    differing = [f"{name} would be {here[name]!r}, not {there[name]!r}" for name in here if here[name] != there[name]]
    if differing:
        raise PluginLoadError(
            f"{selection.id!r} was selected on other terms: here {'; '.join(differing)}",
            "",
            "select again in this process",
        )


def _import(plugin: Plugin) -> ModuleType:
    def refuse(problem: str) -> PluginLoadError:
        from shlex import quote  # noqa: PLC0415 - takes 4 ms, and only failures need it

        block = f"ATTNPLUG_BLOCK={quote(plugin.name)}"
        return PluginLoadError(problem, "", f"repair {plugin.part}, then attnplug.refresh(); or set {block}")

    stage = f"the module {plugin.module!r} of the backend {plugin.name!r} ({plugin.distribution}) does not import:"
    with ForeignCode(stage, refuse):
        return import_module(plugin.module)


def _register(module: ModuleType, plugin: Plugin) -> Any:
    """
    Put one plugin into a separate manager: hooks are addressed to one plugin, and a failure leaves nothing behind.
    """
    from pluggy import PluginManager, PluginValidationError  # noqa: PLC0415 - needed only here, where torch is about to load

    from attnplug.contract import hooks  # noqa: PLC0415 - the contract imports torch

    manager = PluginManager("attnplug")
    manager.add_hookspecs(hooks)
    try:
        manager.register(module)
        manager.check_pending()
    except PluginValidationError as error:
        raise PluginContractError(
            f"a hook of the plugin {plugin.name!r} ({plugin.distribution}) does not match its specification: {error}",
            "",
            "correct the hook",
        ) from error
    if not manager.hook.attnplug_backend.get_hookimpls():
        raise PluginContractError(
            f"the module {plugin.module!r} of the plugin {plugin.name!r} ({plugin.distribution}) implements no hook"
            " attnplug_backend",
            "",
            "define attnplug_backend(variant, agreement) there, marked with @hookimpl",
        )
    return manager


def _backend_class(manager: Any, selection: Selection) -> type[Backend]:
    from attnplug.contract.calls.check import check_backend_class  # noqa: PLC0415 - the contract imports torch

    with ForeignCode(f"the hook attnplug_backend of {selection.id!r} raised", _failed):
        found = manager.hook.attnplug_backend(variant=selection.variant, agreement=selection.agreement)
    check_backend_class(found, selection.id)
    backend_class: type[Backend] = found
    return backend_class


def _construct(backend_class: type[Backend], selection: Selection) -> LoadedBackend:
    from attnplug.contract.loaded import LoadedBackend  # noqa: PLC0415 - the contract imports torch

    with ForeignCode(
        f"{backend_class.__name__}(agreement, device) raised",
        lambda reason: PluginLoadError(f"{selection.id!r} was selected", reason, "repair the plugin, or block it"),
    ):
        backend = backend_class(selection.agreement, selection.device)
    settings = current_state().settings
    candidates = registry().candidates(settings)
    declared = next((one.supports("kv_cache_form") for one in candidates if one.id == selection.id), None)
    return LoadedBackend(backend, selection, () if declared is None else declared.choices(), settings.record)
