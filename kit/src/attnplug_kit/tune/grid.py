"""What is measured: layers times batches, the most important first."""

from __future__ import annotations

import json
import re
from operator import sub
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.errors import RequestError
from attnplug.evidence import bucket_of
from attnplug.models import describe_model, shard
from attnplug.request import Requirements
from attnplug_kit.bench import Step

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from attnplug.contract import RecordedStep, Recording
    from attnplug.request import Device

MOST_DRAFTED: Final = 8
"""New tokens per request of a verification at most; more are a chunk."""

MOST_ABSORBED: Final = 128
"""
New tokens per request that attend to latents at most. Of more, engines expand the latents to keys and values per head:
with DeepSeek-V3's sizes that takes fewer operations from 171 new tokens on.
"""

DEFAULT_BATCHES: Final = {
    "cuda": (
        "decode:64x4096",
        "prefill:4x4096",
        "decode:8x4096",
        "chunk:4x1024@4096",
        "mixed:64x4096+2x1024",
        "decode:256x1024",
        "verify:64x4@4092",
        "decode:1x32768",
    ),
    "cpu": ("decode:8x512", "prefill:1x512", "mixed:8x512+1x256"),
}
"""The batches by default, in the order in which all layers are measured; drafts only where they are requested."""

_BATCH: Final = re.compile(r"([a-z]+):(N)x(N)(?:@(N))?(?:\+(N)x(N))?".replace("N", "[0-9]{1,10}"))
_MOST_KEYS: Final = 2**31 - 1  # of a request: lengths are int32
_MOST_REQUESTS: Final = 2**16
_CONTENT: Final = ("custom_mask", "attn_bias", "mm_prefix")  # fields of tensors that a recording has not
_OF_STEP: Final = ("head_size", "head_size_v", "num_q_heads", "num_kv_heads", "latent", "topk")
_PER_SECOND: Final = {"cuda": 2e14, "cpu": 2e10}  # operations, for the estimate only
_CALLS: Final = 20  # of a candidate: warm-up, screening, rounds
_SETUP_S: Final = {"cuda": 0.6, "cpu": 0.2}  # of a candidate and batch: load, cache, capture; an estimate


@frozen
class Cell:
    """
    One thing to measure.

    Attributes:
        layer: The layer on one rank.
        phase: One of `attnplug.evidence.PHASES`.
        step: The batch.
    """

    layer: Requirements
    phase: str
    step: Step

    @property
    def query_len(self) -> int:
        """New tokens of the longest query."""
        return max(self.step.query_lens)

    @property
    def kv_len(self) -> int:
        """Mean keys of a request."""
        return round(sum(self.step.seq_lens) / self.step.num_reqs)

    @property
    def engine(self) -> dict[str, Any]:
        """The fields of the request that the step does not have, graph level apart."""
        fields = {name: value for name, value in self.layer.to_dict().items() if name not in _OF_STEP}
        return {**fields, **({"decode_query_len": self.query_len} if self.phase == "verify" else {})}

    @property
    def graph_level(self) -> str:
        """The graph level that a host would use for the batch."""
        return {"decode": "single_token_decode", "verify": "uniform_batch"}.get(self.phase, "never")

    def request(self, level: str = "never") -> Requirements:
        """Return the request, with a graph level."""
        return self.step.requirements(**{**self.engine, "cudagraph": level})

    def __str__(self) -> str:
        return f"{self.step.what}; {described(self.layer)}"


def described(layer: Requirements) -> str:
    """Return a layer in words: ``32/8 heads of 128, bfloat16``."""
    size = f"{layer.head_size}" if layer.head_size_v == layer.head_size else f"{layer.head_size}/{layer.head_size_v}"
    plain = {"head_size", "head_size_v", "num_q_heads", "num_kv_heads", "dtype"}
    others = [f"{name}={value}" for name, value in layer.to_dict().items() if name not in plain]
    return ", ".join([f"{layer.num_q_heads}/{layer.num_kv_heads} heads of {size}, {layer.dtype}", *others])


def layers_of_model(config: str, ranks: int, **fields: Any) -> tuple[Requirements, ...]:
    """
    Return the different layers of a model on one rank.

    Args:
        config: A model's config.json, its folder, or a model id in the Hugging Face cache.
        ranks: Devices of the tensor-parallel group.
        fields: Fields that the engine sets.

    Raises:
        RequestError: The configuration cannot be read, or no layer can be expressed.
    """
    model = describe_model(config, paged=True, **fields)
    wanted = [*model.requirements.values(), *model.uncompressed.values()]
    if not wanted:
        raise RequestError(f"{config!r} has no layer that a backend can serve", "", "name another configuration")
    return tuple(dict.fromkeys(shard(each, ranks).requirements for each in wanted))


def layers_of_json(text: str) -> tuple[Requirements, ...]:
    """
    Return the layers of a JSON object or a list of them, given as text or as ``@FILE``.

    Raises:
        RequestError: It is something else.
    """
    try:
        data = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(
            f"--requirements {text!r} cannot be read: {error}", "it is JSON, or @FILE", "correct it"
        ) from error
    if data == []:
        raise RequestError(f"--requirements {text!r} was given", "it has a layer at least", "write one")
    return tuple(dict.fromkeys(map(Requirements.from_dict, data if isinstance(data, list) else [data])))


def parse_batch(text: str) -> tuple[str, tuple[int, ...], tuple[int, ...], str]:
    """
    Read ``decode:64x4096``, ``verify:64x4@4092``, ``prefill:4x4096``, ``chunk:8x128@4096`` or
    ``mixed:64x4096+4x1024``: requests, then keys of a decode or new tokens, cached tokens behind ``@``, and prefills
    beside decodes.

    Returns:
        The phase, new and cached tokens of each request, and the batch in words.

    Raises:
        RequestError: It has another form.
    """
    found = _BATCH.fullmatch(text)
    phase, count, length, cached, prompts, prompt = found.groups() if found else ("",) * 6
    number, size, behind, firsts, new = (int(each or 0) for each in (count, length, cached, prompts, prompt))
    forms = {
        "decode": not cached and not prompts,
        "prefill": not cached and not prompts,
        "verify": bool(cached) and not prompts and 2 <= size <= MOST_DRAFTED,
        "chunk": bool(cached) and not prompts and size > 1,
        "mixed": bool(firsts and new) and not cached,
    }
    fits = number + firsts <= _MOST_REQUESTS and max(size + behind, new) <= _MOST_KEYS
    if not forms.get(phase, False) or not number or not size or not fits:
        raise RequestError(
            f"--batch {text!r} was given",
            "it is decode:64x4096, verify:64x4@4092 (2 to 8 new tokens), prefill:4x4096, chunk:8x128@4096 or "
            f"mixed:64x4096+4x1024; at most {_MOST_REQUESTS} requests of {_MOST_KEYS} keys",
            "write one of these, with other numbers",
        )
    if phase == "decode":
        return phase, (1,) * number, (size - 1,) * number, f"decode, {number} x {size}"
    if phase == "prefill":
        return phase, (size,) * number, (0,) * number, f"prefill, {number} x {size}"
    if phase == "mixed":
        what = f"mixed, {number} decodes x {size} and {firsts} prefills x {new}"
        return phase, (1,) * number + (new,) * firsts, (size - 1,) * number + (0,) * firsts, what
    return phase, (size,) * number, (behind,) * number, f"{phase}, {number} x {size} new behind {behind}"


def make_grid(layers: Sequence[Requirements], batches: Iterable[str]) -> tuple[Cell, ...]:
    """
    Return the cells: each batch for all layers, then the next. A layer has the phases that it requests, drafts where
    its decodes have several tokens, and without a KV cache first prefills alone. Over latents it has batches of at most
    `MOST_ABSORBED` new tokens per request.

    Args:
        layers: The layers.
        batches: The batches, as of `parse_batch`.

    Raises:
        RequestError: A batch has another form, or none is for any of the layers.
    """
    parsed = [parse_batch(text) for text in batches]
    found = [
        _cell(layer, phase, query_lens, cached_lens, what)
        for phase, query_lens, cached_lens, what in parsed
        for layer in layers
        if _has_phase(layer, phase) and not (layer.latent and max(query_lens) > MOST_ABSORBED)
    ]
    if not found:
        raise RequestError("no batch is for any of the layers", "", "name batches of the phases that they have")
    return tuple(found)


def cell_of(step: RecordedStep) -> Cell | None:
    """
    Return a recorded step as a cell, decodes first.

    None where the CPU had no lengths, ranks share the KV cache, or a mask, bias or span, which is content and is not
    recorded, may have been part of it.
    """
    requests, layer = step.layer.agreement.requirements, step.layer
    if step.query_lens is None or step.seq_lens is None or not step.query_lens or layer.dcp_size > 1:
        return None
    if requests.attn_type != "decoder" or not requests.paged or any(getattr(requests, name) for name in _CONTENT):
        return None
    pairs = sorted(zip(step.query_lens, step.seq_lens, strict=True), key=lambda pair: pair[0] > 1)
    new, keys = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    cached = tuple(map(sub, keys, new))
    phase = _phase_of(new, cached, requests.decode_query_len)
    spread = f"{min(keys)} keys" if min(keys) == max(keys) else f"{min(keys)} to {max(keys)} keys"
    layer_alone = requests.evolve(cudagraph="never")  # the cell sets the level
    return _cell(layer_alone, phase, new, cached, f"{phase}, {len(new)} requests, {sum(new)} new tokens, {spread}")


def cells_of(recording: Recording) -> tuple[Cell, ...]:
    """
    Return what to measure of a recording: of each layer, phase and bucket the step of median size, frequent ones first.

    Raises:
        RequestError: No step can be measured.
    """
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in map(cell_of, recording.steps):
        if cell is not None:
            place = bucket_of(cell.step.num_reqs), bucket_of(cell.kv_len)
            groups.setdefault((cell.layer, cell.phase, *place), []).append(cell)
    if not groups:
        raise RequestError("no recorded step can be measured", "a step has its lengths and a KV cache", "record others")
    frequent = sorted(groups.values(), key=len, reverse=True)
    return tuple(sorted(cells, key=lambda cell: sum(cell.step.seq_lens))[len(cells) // 2] for cells in frequent)


def _phase_of(new: Sequence[int], cached: Sequence[int], drafted: int) -> str:
    if max(new) == 1:
        return "decode"
    if 1 < max(new) == min(new) <= min(drafted, MOST_DRAFTED) and all(cached):
        return "verify"
    if min(new) == 1:
        return "mixed"
    return "chunk" if any(cached) else "prefill"


def _has_phase(layer: Requirements, phase: str) -> bool:
    if not layer.paged:
        return phase == "prefill"
    if phase == "verify" and layer.decode_query_len == 1:
        return False
    return ("decode" if phase in ("decode", "verify") else "prefill") in layer.phases or phase == "mixed"


def _cell(layer: Requirements, phase: str, new: tuple[int, ...], cached: tuple[int, ...], what: str) -> Cell:
    fields = {name: getattr(layer, name) for name in _OF_STEP}
    return Cell(layer, phase, Step(what, new, cached, **fields))


def estimated_seconds(cell: Cell, device: Device, candidates: int) -> float:
    """Return about how long a cell takes: setups, and the operations of a candidate's calls. Compiling comes on top."""
    step, kind = cell.step, "cpu" if device.type == "cpu" else "cuda"
    pairs = sum(new * (old + new / 2) for new, old in zip(step.query_lens, step.cached_lens, strict=True))
    past = sum(old * old / 2 for old in step.cached_lens)
    each = 2 * step.num_q_heads * (step.head_size + step.size_v) / _PER_SECOND[kind]
    return candidates * (_SETUP_S[kind] + each * (pairs * _CALLS + past))
