"""Each declared value, and each together with each other one, compared with the float64 oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from attrs import evolve

from attnplug.contract import Limits
from attnplug.request import FIELDS
from attnplug_kit.conformance.cache_writes import new_slots, require_rows
from attnplug_kit.conformance.drawing import OF_HOSTS
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.pairwise import covering_specs
from attnplug_kit.conformance.serving import load_for, plain, require, runner_for, serve
from attnplug_kit.conformance.tier import Tier, needs, over
from attnplug_kit.fields import CUTS, ROWS, tested
from attnplug_kit.oracle import Paged, SceneRunner, assert_output, limits_of, materialize
from attnplug_kit.oracle.running import step_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from attnplug_kit.conformance.drawing import Draw
    from attnplug_kit.conformance.report import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Scene

_HEADS: Final = 8
_LONGEST: Final = 2**15
_LAST: Final = 512
_LARGEST_GAIN: Final = 3000.0  # of queries in float16
_SPARE_BLOCKS: Final = (300, 33000)
_LARGEST_POOL: Final = 2**25  # numbers of the keys: 128 MiB in float32

# New tokens and tokens before them. Long requests are what kernels split, depending on how much else there is to do.
_DECODES: Final = ((1, 30), (1, 1100), (1, 64))
_PREFILLS: Final = ((12, 7), (140, 600))
_OTHERS: Final = tuple((1, 7 * number % 50) for number in range(37))
_LIMITS: Final = Limits(max_num_reqs=48, max_num_tokens=1024, max_seq_len=2048)  # an engine's do not change either


def _capabilities(subject: Subject) -> Mapping[str, RequestSpec]:
    declared = field_values_of(subject)
    names = [n for n in declared.values() if FIELDS[n].kind != "device" and n not in tested("elsewhere")]
    wide = [value for value in declared.values().get("head_size_v", ()) if value > plain(subject).fields["head_size"]]
    both = {f"head_size_v={value} kv_layout=HND": declared.spec(head_size_v=value, kv_layout="HND") for value in wide}
    return {**declared.of(*names), **{name: spec for name, spec in both.items() if spec is not None}}


def _pairs(subject: Subject) -> Mapping[str, RequestSpec]:
    return {f"{number:02}": spec for number, spec in enumerate(covering_specs(subject))}


def _long(subject: Subject) -> Mapping[str, RequestSpec]:
    specs = field_values_of(subject).of(*tested("long"))
    return {name: spec for name, spec in specs.items() if "attn_type" not in spec.fields}


def _many_keys(subject: Subject, spec: RequestSpec) -> dict[str, Any]:
    """Return the lengths of requests with many keys, in the phases of the request; interpreted kernels get fewer."""
    lens = {"decode": ((1, 1), (2100, 300)), "prefill": ((200,), (600,))}
    if subject.is_interpreted:
        lens = {"decode": ((1, 1), (1100, 300)), "prefill": ((130,), (300,))}
    parts = [lens[phase] for phase in ("decode", "prefill") if phase in spec.fields.get("phases", lens)]
    query_lens, context_lens = (sum(each, ()) for each in zip(*parts, strict=True))
    return {"query_lens": query_lens, "context_lens": context_lens}


def _many(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return a request with more KV heads than elsewhere, if that is served, and one for each of the fields."""
    # Of the values of a field it takes one in the middle: the smallest window hides what else a request has.
    # Interpreted kernels get the plain request alone.
    declared = field_values_of(subject)
    if subject.is_interpreted:
        return {"plain": plain(subject)}
    found = {"plain": declared.spec(num_kv_heads=_HEADS) or plain(subject)}
    for name in tested("long"):
        specs = [each for each in declared.of(name).items() if "attn_type" not in each[1].fields]
        found.update(specs[len(specs) // 2 :][:1])
    return found


def _saturated(subject: Subject) -> Mapping[str, RequestSpec]:
    return field_values_of(subject).of("logits_soft_cap")


def _alibi(subject: Subject) -> Mapping[str, RequestSpec]:
    return {name: spec for name, spec in field_values_of(subject).of("alibi").items() if "phases" not in spec.fields}


def _with_dominant_first_keys(scene: Scene) -> Scene:
    """Return the scene with first keys to which the last query of the first head of each group attends most."""
    keys = []
    ratio = scene.case.num_q_heads // scene.case.num_kv_heads
    for queries, rows in zip(scene.queries, scene.keys, strict=True):
        last = queries[-1, ::ratio].double()
        wanted = float(scene.alibi_slopes.max()) * len(rows) + 10 if scene.alibi_slopes is not None else 10
        first = last * (wanted / (scene.scale * last.square().sum(-1, keepdim=True)))
        keys.append(torch.cat([first.to(rows.dtype).unsqueeze(0), rows[1:]]))
    return evolve(scene, keys=tuple(keys))


def _cuts(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return requests for large windows and chunks."""
    declared = field_values_of(subject)
    found = {f"{name}={size}": declared.spec(**{name: size}) for name in CUTS for size in ROWS[name].large}
    return {name: spec for name, spec in found.items() if spec is not None}


def _spare_blocks(subject: Subject) -> Mapping[str, int]:
    del subject
    return {str(count): count for count in _SPARE_BLOCKS}


def _decode_query_lens(subject: Subject) -> Mapping[str, RequestSpec]:
    return field_values_of(subject).of("decode_query_len")


def _batch_invariant(subject: Subject) -> Mapping[str, RequestSpec]:
    """Return a plain request for batch invariance, and one with each value by which kernels may split differently."""
    declared = field_values_of(subject)
    if not declared.of("batch_invariant"):
        return {}
    names: dict[RequestSpec | None, str] = {}
    fields = {str(item): {item.field: item.value} for item in declared.specs if item.field in tested("splits")}
    for name, own in {"plain": {}, **fields}.items():
        names.setdefault(declared.spec(batch_invariant=True, **own), name)
    return {name: spec for spec, name in names.items() if spec is not None}


class Capabilities(Tier):
    """Every declared value that this device can reach."""

    def test_declared_values_are_served(self, subject: Subject) -> None:
        """The manifest's own rules refuse no declared value in every request."""
        unserved = [f"{item.capability} ({item.because})" for item in field_values_of(subject).unserved]
        require(not unserved, f"{subject}: declared, and refused in every request: {'; '.join(unserved)}")

    @over(_capabilities)
    def test_capability(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """A declared value gives the oracle's output, and its LSE if that is served."""
        for seed in (11, 12):
            spec = draw(point, many_heads=not subject.is_interpreted) if seed % 2 else point
            case = spec.case(seed, gain=1.0 if seed % 2 else 4.0)
            serve(subject, spec, record, case if seed % 2 else case.reordered())

    @over(_pairs)
    def test_pairs(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """Every two compatible declared values together give the oracle's output."""
        spec = draw(point)
        serve(subject, spec, record, spec.case(seed=21).reordered())

    @over(_long)
    def test_long_sequences(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """Many keys, which kernels split and merge, and more rows than a tile has, give the oracle's output."""
        spec = draw(point)
        serve(subject, spec, record, spec.case(seed=23, any_order=True, **_many_keys(subject, spec)))

    def test_long_steps_of_one_state(self, subject: Subject, draw: Draw) -> None:
        """Steps with many keys, whose splits fill a workspace, share a state; both are built before the first runs."""
        spec = draw(plain(subject))
        case = spec.case(31, **_many_keys(subject, spec))
        scenes = [materialize(evolve(case, seed=seed)) for seed in (31, 32)]
        runner = runner_for(subject, spec, scenes[0], limits=limits_of(scenes[0]))
        calls = [runner.call(scene) for scene in scenes]
        built = [runner.builder.build(call.batch) for call in calls]
        for call, metadata in zip(calls, built, strict=True):
            runner.forward(call, metadata)
        for number, (call, scene) in enumerate(zip(calls, scenes, strict=True), 1):
            runner.compare(call, scene, f"{subject} with {spec}: long step {number} of one state")

    @pytest.mark.slow
    def test_32768_keys(self, subject: Subject, draw: Draw) -> None:
        """The last tokens of a prompt of 32,768, of which some rows are compared, and decodes behind as many keys."""
        if subject.is_interpreted:
            pytest.skip(f"{subject}: interpreted kernels would take hours")
        declared = field_values_of(subject)
        few = declared.spec(num_kv_heads=1, gqa_ratio=2) or plain(subject)
        spec = draw(few, keep=("num_kv_heads", "gqa_ratio", "kv_in_cache", "kv_cache_dtype", "seq_lens_cpu_kind"))
        if dict(spec.fields.get("block_sparse") or ()).get("max_seqlen", _LONGEST + 1) <= _LONGEST:
            pytest.skip(f"{subject}: the sparse pattern of the request covers fewer keys")
        phases, paged = spec.fields.get("phases", ("prefill", "decode")), spec.fields.get("paged", True)
        if "prefill" in phases:
            # All of its tokens at once would take 8 GB where a backend holds all scores.
            context = _LONGEST - _LAST if paged else 0
            whole = materialize(spec.case(33, query_lens=(_LAST,), context_lens=(context,)))
            runner = runner_for(subject, spec, whole, limits=limits_of(whole))
            output = runner.run(whole).output
            for row in (0, 1, 255, _LAST - 1):
                step = step_of(whole, [(context + row, context + row + 1)])
                assert_output(output[row : row + 1], step)
        if "decode" in phases:
            decodes = materialize(spec.case(34, query_lens=(1, 1), context_lens=(_LONGEST, 300)))
            runner = runner_for(subject, spec, decodes, limits=limits_of(decodes))
            runner.compare(runner.run(decodes).call, decodes, f"{subject} with {spec}: decodes of {_LONGEST} keys")

    @over(_saturated)
    def test_scores_beyond_the_soft_cap(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """Scores of 100 times the soft cap are the cap: nothing overflows."""
        spec = draw(point, keep=("kv_cache_dtype",))  # FP8 queries would saturate first
        serve(subject, spec, record, spec.case(seed=35, gain=min(100 * spec.fields["logits_soft_cap"], _LARGEST_GAIN)))

    @over(_alibi)
    def test_dominant_far_key(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """With ALiBi, a first key whose score exceeds what its distance subtracts has most of the weight."""
        spec = draw(point, keep=("kv_cache_dtype",))
        scene = _with_dominant_first_keys(
            materialize(spec.case(36, query_lens=(1, 9), context_lens=(150, 90), shared_blocks=0))
        )
        runner = runner_for(subject, spec, scene)
        runner.compare(runner.run(scene).call, scene, f"{subject} with {spec}: a far key has most of the weight")
        record.served(runner.backend)

    @over(_cuts)
    def test_beyond_cuts(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """Sequences longer than a large window or chunk give the oracle's output."""
        spec = draw(point, keep=("kv_cache_dtype",))  # FP8 tolerances are wide, and its oracle is slow
        size = next(spec.fields[name] for name in CUTS if name in spec.fields)
        lens: dict[str, Any] = {"query_lens": (1, 12, 1), "context_lens": (size + size // 2, size - 5, size)}
        if (phases := spec.fields.get("phases")) is not None:
            keep = slice(1, 2) if phases == ("prefill",) else slice(None, None, 2)
            lens = {name: one[keep] for name, one in lens.items()}
        serve(subject, spec, record, spec.case(seed=27, **lens))

    @needs(phases=("prefill",))
    def test_long_prompt(self, subject: Subject, draw: Draw, record: Record) -> None:
        """A prompt of more tokens than a chunk of chunked prefill has commonly."""
        base = plain(subject, phases=("prefill",))
        few = field_values_of(subject).spec(phases=("prefill",), num_kv_heads=1, gqa_ratio=2)
        spec = draw(few or base, keep=("num_kv_heads", "gqa_ratio", "kv_in_cache"))
        lens: dict[str, Any] = {"query_lens": (300 if subject.is_interpreted else 2100,), "context_lens": (0,)}
        case = spec.case(seed=28, **lens)
        ran = serve(subject, spec, record, case)
        if isinstance(ran.call, Paged):
            scene = materialize(case)
            require_rows(load_for(subject, spec, case), scene, ran.call, new_slots(ran.call, scene))

    @needs(paged=True)
    @over(_spare_blocks)
    def test_large_block_numbers(self, subject: Subject, draw: Draw, record: Record, point: int) -> None:
        """Block numbers beyond 8 and 16 bits are those of the oracle; the pool is larger than what is used of it."""
        declared = field_values_of(subject)
        few = (declared.spec(paged=True, num_kv_heads=1, block_size=size) for size in (1, 8, 16))
        spec = next((one for one in few if one is not None), plain(subject, paged=True))
        numbers = spec.fields["num_kv_heads"] * spec.fields["head_size"] * spec.fields["block_size"] * point
        if numbers > _LARGEST_POOL:
            pytest.skip(
                f"{subject}: the smallest pool of {point} blocks has {numbers} numbers, and the kit's limit is less"
            )
        spec = draw(spec, keep=("num_kv_heads", "block_size", "head_size", "kv_in_cache"))
        serve(subject, spec, record, spec.case(seed=29, num_spare_blocks=point))

    def test_split_kv_limit(self, subject: Subject, draw: Draw) -> None:
        """With any split-KV limit that is supported, every key is attended to."""
        spec = draw(plain(subject))
        scene = materialize(spec.case(26, **_many_keys(subject, spec)))
        backend = load_for(subject, spec, scene.case)
        if not backend.supports_max_num_splits:
            pytest.skip(f"{subject}: limits with a split-KV limit are refused")
        for limit in (1, 3):
            runner = SceneRunner(backend, scene, limits=evolve(limits_of(scene), max_num_splits=limit))
            runner.compare(runner.run(scene).call, scene, f"{subject}: limits with max_num_splits={limit}")

    @over(_many)
    def test_many_requests(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """More requests than a block has threads; the plain request has more than 256."""
        spec = draw(point, keep=("gqa_ratio",) if "num_kv_heads" in point.fixed or subject.is_interpreted else ())
        decodes = 70 if subject.is_interpreted else 300 if "num_kv_heads" in point.fixed else 130
        context_lens = spec.over_pages(tuple(7 * request % 50 for request in range(decodes + 4)))
        lens: dict[str, Any] = {"query_lens": (*[1] * decodes, *[3, 18] * 2), "context_lens": context_lens}
        serve(subject, spec, record, spec.case(seed=24, any_order=True, **lens))

    @over(_decode_query_lens)
    def test_decodes_of_several_tokens(self, subject: Subject, draw: Draw, record: Record, point: Any) -> None:
        """A batch of decodes of several tokens is causal within each, whether or not they are equally many."""
        longest = point.fields["decode_query_len"]
        spec = draw(point)
        for queries, contexts in (
            ((longest, 1, longest), (33, 0, 7)),
            ((1, longest, 1), (18, 5, 40)),
            ((min(3, longest),) * 3, (50, 4, 17)),
            ((min(2, longest), 1, min(3, longest)), (9, 30, 4)),  # as many tokens as if all had the first one's
        ):
            lens: dict[str, Any] = {"query_lens": queries, "context_lens": spec.over_pages(contexts)}
            serve(subject, spec, record, spec.case(seed=25, **lens))

    @over(_batch_invariant)
    def test_batch_invariant(self, subject: Subject, draw: Draw, point: Any) -> None:
        """With batch invariance, a request has the same bits alone, in a small and a large batch, and at any place."""
        _require_same_bits(subject, draw(point, keep=(*OF_HOSTS, "dtype")), seed=22)


def _require_same_bits(subject: Subject, spec: RequestSpec, seed: int) -> None:
    phases = spec.fields.get("phases", ("prefill", "decode"))
    decodes, prefills = _DECODES * ("decode" in phases), _PREFILLS * ("prefill" in phases)
    others = _OTHERS * ("decode" in phases)
    query_lens, context_lens = zip(*decodes, *prefills, *others, strict=True)
    whole = materialize(spec.case(seed, query_lens=query_lens, context_lens=context_lens))
    runner = runner_for(subject, spec, whole, limits=_LIMITS)
    alone = {member: _bits(runner, _part(whole, [member]))[0] for member in range(len(decodes) + len(prefills))}
    for where, members in _batches(len(decodes), len(prefills), len(others)).items():
        for member, bits in zip(members, _bits(runner, _part(whole, members)), strict=True):
            same = member not in alone or torch.equal(bits, alone[member])
            which = f"request {member} ({query_lens[member]} new tokens, {context_lens[member]} before)"
            require(same, f"{subject} with {spec}: batch_invariant, and {which} has other bits {where} than alone")


def _batches(decodes: int, prefills: int, others: int) -> Mapping[str, Sequence[int]]:
    """Return the members of each batch, decodes first, by a description of their place."""
    first, then = range(decodes), range(decodes, decodes + prefills)
    many = range(decodes + prefills, decodes + prefills + others)
    return {
        "in a small batch": (*first, *then),
        "in another order": (*reversed(first), *reversed(then)),
        "before many others": (*first, *many, *then),
        "behind many others": (*many, *first, *then),
    }


def _part(whole: Scene, members: Sequence[int]) -> Scene:
    """Return some of the requests, with their tokens, in other pages."""

    def of(owner: Any, *names: str) -> dict[str, Any]:
        return {name: tuple(getattr(owner, name)[member] for member in members) for name in names}

    made = materialize(evolve(whole.case, **of(whole.case, "query_lens", "context_lens")))
    tokens = of(whole, "queries", "keys", "values")
    masks = None if whole.masks is None else tuple(whole.masks[member] for member in members)
    return evolve(made, rounding=whole.rounding, int8_rounding=whole.int8_rounding, masks=masks, **tokens)


def _bits(runner: SceneRunner, scene: Scene) -> tuple[Tensor, ...]:
    """Run a batch, and return the output of each request with its LSE appended."""
    ran = runner.run(scene)
    return torch.split(torch.cat([ran.output.float(), ran.lse.unsqueeze(-1)], -1), list(scene.case.query_lens))
