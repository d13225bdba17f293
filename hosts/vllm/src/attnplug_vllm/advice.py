"""Verdicts and fixes of attnplug in the words of vLLM's command line."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from attnplug_vllm.names import name_of, takes_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from attnplug import Explanation, Fix, Verdict

OWN: Final = "leave --attention-backend out: vLLM then chooses one of its own"
"""The fix where no backend of attnplug can serve."""

_SETTINGS: Final[Mapping[str, Callable[[Any], str]]] = {
    "batch_invariant": lambda on: f"set VLLM_BATCH_INVARIANT={int(on)}",
    "block_size": lambda size: f"pass --block-size {size}",
    "causal": lambda _: "set use_non_causal to false in --attention-config",
    "cudagraph": lambda _: "pass --enforce-eager",
    "dcp_size": lambda size: f"pass --decode-context-parallel-size {size}",
    "decode_query_len": lambda _: "leave --speculative-config out",
    "kv_cache_dtype": lambda name: f"pass --kv-cache-dtype {_NAMES.get(name, name)}",
    "kv_cache_form": lambda _: "leave --kv-transfer-config out",
    "kv_layout": lambda name: f"set VLLM_KV_CACHE_LAYOUT={name}",
    "per_head_scales": lambda _: "use a checkpoint with one scale for each tensor",
    "seq_lens_cpu_kind": lambda _: "pass --no-async-scheduling",
}
"""How an engine's field is set in vLLM."""

_NAMES: Final[Mapping[str, str]] = {"fp8_e4m3": "fp8", "float32": "auto"}


def text_of(verdict: Verdict) -> str:
    """Return the reasons against a candidate, and its fix, as one line."""
    why = "; ".join(map(str, verdict.reasons)) or verdict.status
    fix = verdict.fix
    return f"{verdict.id}: {why}" + (f" (fix: {fix_text(fix)})" if fix is not None and fix.possible else "")


def fix_text(fix: Fix) -> str:
    """Return a fix in words; what an engine requests is set in vLLM."""
    others = str(attrs.evolve(fix, engine={}))
    settings = (_setting(name, value) for name, value in fix.engine.items())
    return "; ".join(filter(None, (others, *settings)))


def refusals(explanation: Explanation, permitted: Iterable[str]) -> list[str]:
    """
    Return the reasons and the fix of each candidate that was permitted, a line each.

    Args:
        explanation: The verdicts.
        permitted: Candidates, backends, or ``auto`` for any; empty for all. Without a name those that are not installed
            say nothing, unless there are no others.
    """
    names = set(permitted)
    named = set(explanation.named)  # also a routed pair, which has two names
    verdicts = [v for v in explanation.verdicts if v.id in named or is_permitted((v.id, v.id.partition("/")[0]), names)]
    listed = [verdict for verdict in verdicts if names or verdict.status != "absent"] or verdicts
    return [text_of(verdict) for verdict in listed] or ["no attention backend of attnplug is installed"]


def is_pair(name: str) -> bool:
    """Whether a name is that of a routed pair: vLLM has no name for these, and ``ATTNPLUG_BACKEND`` takes it."""
    return "+" in name


def is_permitted(names: Iterable[str], permitted: set[str]) -> bool:
    """Whether one of a candidate's names is permitted. Nothing named permits all, and so does ``auto``."""
    return not permitted or "auto" in permitted or not permitted.isdisjoint(names)


def way_on(explanation: Explanation) -> str:
    """Return what to pass to vLLM where nothing that may be chosen can serve: another name, the fixes, or its own."""
    able = next((v.id for v in explanation.verdicts if v.status == "eligible" and not is_pair(v.id)), None)
    if able is not None and takes_names():
        return f"pass --attention-backend {name_of(able)}"
    if able is not None:
        return f"set ATTNPLUG_BACKEND={able}"
    return "; or ".join([*_fixes(explanation), OWN])


def _fixes(explanation: Explanation) -> Iterator[str]:
    for verdict in explanation.verdicts:
        fix = verdict.fix
        if verdict.status != "absent" and fix is not None and fix.possible and fix.device is None:
            yield f"{verdict.id}: {fix_text(fix)}"


def _setting(name: str, value: Any) -> str:
    write = _SETTINGS.get(name)
    return f"request {name}={value!r}" if write is None else write(value)
