"""What the manifest serves and refuses: by request and device, in the words that a user reads. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

import attnplug
from attnplug import Device, Requirements
from attnplug.discovery.plugin import read_known
from attnplug.errors import RequirementsError
from attnplug.manifest.installed import requirement_name
from attnplug.manifest.reader import read_manifest
from attnplug.negotiation.candidate import make_candidate
from attnplug.negotiation.evaluation import evaluate
from attnplug.negotiation.fix import find_fix
from attnplug.negotiation.matching import Request
from attnplug.negotiation.ranking import Policy, rank
from attnplug.request.toml import parse_toml
from attnplug_kit.check.examine import examine
from plugins.flash_attn.tests.real import FLASH_ATTN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug import Verdict
    from attnplug.negotiation.verdict import Fix

PROJECT = Path(__file__).parents[1]
MANIFEST = PROJECT / "src" / "attnplug_flash_attn" / "attnplug.toml"
TURING, AMPERE, HOPPER, BLACKWELL, B300, THOR, GEFORCE = (
    Device.cuda(capability) for capability in ("7.5", "8.0", "9.0", "10.0", "10.3", "11.0", "12.0")
)
AMD, CPU = Device("cuda", vendor="amd"), Device.cpu()
VARIANTS = ("fa2", "fa2_vllm", "fa3", "fa3_vllm", "fa4", "torch")

LLAMA = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
PAGES_16 = LLAMA.evolve(block_size=16)
GRAPHS = LLAMA.evolve(cudagraph="uniform_batch")
GEMMA_2 = LLAMA.evolve(head_size=256, num_q_heads=16, logits_soft_cap=50.0, sliding_window=4096)
GPT_OSS = LLAMA.evolve(head_size=64, num_q_heads=64, sinks=True, sliding_window=128)
ALIBI = LLAMA.evolve(alibi="linear")
FP8 = LLAMA.evolve(kv_cache_dtype="fp8")
CASCADE = LLAMA.evolve(cascade=True, return_lse=True)
DCP = LLAMA.evolve(dcp_size=2)
CROSS = LLAMA.evolve(attn_type="encoder_decoder")
DENSE = LLAMA.evolve(paged=False)
ENCODER = DENSE.evolve(attn_type="encoder_only")

ON_AMPERE = "fa2_vllm fa2 torch"
ON_HOPPER = "fa3_vllm fa3 fa4 fa2 fa2_vllm torch"
ON_BLACKWELL = "fa4 fa2 fa2_vllm torch"
NOBODY = ""


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """Register the plugin for these tests, unless it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        FLASH_ATTN.register(patch)
        yield


def ask(requirements: Requirements, device: Device) -> dict[str, Verdict]:
    """Return the verdict of each variant, the preferred one first."""
    explanation = attnplug.explain(requirements, device, backend="flash_attn", assume_installed=True)
    return {v.id.partition("/")[2]: v for v in explanation.verdicts if v.id.startswith("flash_attn/")}


def refusals(requirements: Requirements, variant: str, device: Device = HOPPER) -> list[str]:
    """Return the reasons of a variant that refuses."""
    verdict = ask(requirements, device)[variant]
    assert verdict.status == "refused"
    return [str(reason) for reason in verdict.reasons]


@pytest.mark.parametrize(
    ("requirements", "device", "serving"),
    [
        pytest.param(LLAMA, TURING, NOBODY, id="Llama on Turing"),
        pytest.param(LLAMA, AMPERE, ON_AMPERE, id="Llama on Ampere"),
        pytest.param(LLAMA, HOPPER, ON_HOPPER, id="Llama on Hopper"),
        pytest.param(LLAMA, BLACKWELL, ON_BLACKWELL, id="Llama on a B200"),
        pytest.param(LLAMA, B300, ON_BLACKWELL, id="Llama on a B300"),
        pytest.param(LLAMA, THOR, ON_BLACKWELL, id="Llama on Thor"),
        pytest.param(LLAMA, GEFORCE, "fa2 fa2_vllm torch", id="Llama on a GeForce of that generation"),
        pytest.param(LLAMA, AMD, NOBODY, id="Llama on an AMD GPU"),
        pytest.param(LLAMA, CPU, NOBODY, id="Llama on the CPU"),
        pytest.param(LLAMA.evolve(dtype="float16"), HOPPER, ON_HOPPER, id="float16"),
        pytest.param(LLAMA.evolve(dtype="float32"), HOPPER, NOBODY, id="float32"),
        pytest.param(LLAMA.evolve(head_size=80), HOPPER, ON_HOPPER, id="heads of 80"),
        pytest.param(LLAMA.evolve(head_size=72), HOPPER, "fa3_vllm fa3 fa2 fa2_vllm torch", id="heads of 72"),
        pytest.param(DENSE.evolve(head_size=72), HOPPER, ON_HOPPER, id="heads of 72 without a cache"),
        pytest.param(LLAMA.evolve(head_size=100), HOPPER, NOBODY, id="heads of 100"),
        pytest.param(LLAMA.evolve(head_size=264), HOPPER, NOBODY, id="heads of 264"),
        pytest.param(LLAMA.evolve(head_size=256), BLACKWELL, ON_BLACKWELL, id="heads of 256 on Blackwell"),
        pytest.param(LLAMA.evolve(head_size=192), BLACKWELL, "fa2 fa2_vllm torch", id="heads of 192 on Blackwell"),
        pytest.param(PAGES_16, AMPERE, "fa2_vllm torch", id="pages of 16 on Ampere"),
        pytest.param(PAGES_16, HOPPER, "fa3_vllm fa3 fa4 fa2_vllm torch", id="pages of 16 on Hopper"),
        pytest.param(PAGES_16, BLACKWELL, "fa4 fa2_vllm torch", id="pages of 16 on Blackwell"),
        pytest.param(LLAMA.evolve(block_size=24), HOPPER, "torch", id="pages of 24"),
        pytest.param(LLAMA.evolve(block_size=128), HOPPER, "fa3_vllm fa3 fa2_vllm torch", id="pages of a tile"),
        pytest.param(LLAMA.evolve(block_size=256), HOPPER, ON_HOPPER, id="pages of 256"),
        pytest.param(LLAMA.evolve(block_size=512), AMPERE, ON_AMPERE, id="pages of 512"),
        pytest.param(LLAMA.evolve(block_size=384), AMPERE, "fa2_vllm torch", id="pages of 384"),
        pytest.param(ALIBI, AMPERE, "fa2_vllm fa2", id="ALiBi on Ampere"),
        pytest.param(ALIBI, HOPPER, "fa2 fa2_vllm", id="ALiBi on Hopper"),
        pytest.param(ALIBI.evolve(block_size=16), BLACKWELL, "fa2_vllm", id="ALiBi in pages of 16 on Blackwell"),
        pytest.param(ALIBI.evolve(return_lse=True), HOPPER, "fa2 fa2_vllm", id="ALiBi with LSE"),
        pytest.param(LLAMA.evolve(alibi="sqrt"), HOPPER, NOBODY, id="ALiBi of the other form"),
        pytest.param(GPT_OSS, AMPERE, NOBODY, id="gpt-oss on Ampere"),
        pytest.param(GPT_OSS, HOPPER, "fa3_vllm fa4", id="gpt-oss on Hopper"),
        pytest.param(GPT_OSS, BLACKWELL, "fa4", id="gpt-oss on Blackwell"),
        pytest.param(GPT_OSS, GEFORCE, NOBODY, id="gpt-oss on a GeForce"),
        pytest.param(GPT_OSS.evolve(num_q_heads=128), HOPPER, "fa4", id="sinks of 128 heads"),
        pytest.param(GPT_OSS.evolve(dtype="float16"), HOPPER, "fa4", id="sinks in float16"),
        pytest.param(GPT_OSS.evolve(alibi="linear"), HOPPER, NOBODY, id="sinks and ALiBi"),
        pytest.param(GEMMA_2, HOPPER, "fa3_vllm fa3 fa4 fa2 fa2_vllm", id="Gemma 2 on Hopper"),
        pytest.param(GEMMA_2, AMPERE, "fa2_vllm fa2", id="Gemma 2 on Ampere"),
        pytest.param(FP8, HOPPER, "fa3_vllm fa3", id="an 8-bit cache on Hopper"),
        pytest.param(FP8.evolve(per_head_scales=True), HOPPER, "fa3_vllm fa3", id="scales per head"),
        pytest.param(FP8, BLACKWELL, NOBODY, id="an 8-bit cache on Blackwell"),
        pytest.param(LLAMA.evolve(kv_cache_dtype="fp8_e5m2"), HOPPER, NOBODY, id="the other 8-bit cache"),
        pytest.param(LLAMA.evolve(kv_cache_dtype="int8"), HOPPER, NOBODY, id="an int8 cache"),
        pytest.param(FP8.evolve(sinks=True), HOPPER, "fa3_vllm", id="an 8-bit cache with sinks"),
        pytest.param(FP8.evolve(dcp_size=2), HOPPER, "fa3_vllm fa3", id="an 8-bit cache over two ranks"),
        pytest.param(GRAPHS, HOPPER, "fa3_vllm fa3 fa4 fa2 fa2_vllm", id="graphs of decodes"),
        pytest.param(GRAPHS.evolve(cudagraph="always"), HOPPER, "fa3_vllm fa3", id="graphs of any batch"),
        pytest.param(GRAPHS.evolve(cudagraph="always"), BLACKWELL, NOBODY, id="graphs of any batch on Blackwell"),
        pytest.param(CASCADE, HOPPER, ON_HOPPER, id="a shared prefix"),
        pytest.param(CASCADE.evolve(sinks=True), HOPPER, "fa3_vllm fa4", id="a shared prefix with sinks"),
        pytest.param(DCP, HOPPER, "fa3_vllm fa3 fa4 torch", id="two ranks"),
        pytest.param(DCP, AMPERE, "torch", id="two ranks on Ampere"),
        pytest.param(DCP.evolve(sinks=True), HOPPER, "fa3_vllm fa4", id="two ranks with sinks"),
        pytest.param(DCP.evolve(dcp_size=4, cudagraph="always"), HOPPER, "fa3_vllm fa3", id="four ranks in graphs"),
        pytest.param(LLAMA.evolve(batch_invariant=True), HOPPER, ON_HOPPER, id="batch-invariant"),
        pytest.param(LLAMA.evolve(decode_query_len=4), AMPERE, ON_AMPERE, id="decodes of four tokens"),
        pytest.param(LLAMA.evolve(seq_lens_cpu_kind="absent"), AMPERE, ON_AMPERE, id="lengths on the device alone"),
        pytest.param(LLAMA.evolve(kv_sharing=True), HOPPER, ON_HOPPER, id="a cache of another layer"),
        pytest.param(LLAMA.evolve(causal=False), HOPPER, ON_HOPPER, id="bidirectional over a cache"),
        pytest.param(LLAMA.evolve(kv_layout="HND"), HOPPER, ON_HOPPER, id="heads before tokens"),
        pytest.param(DENSE, HOPPER, ON_HOPPER, id="dense on Hopper"),
        pytest.param(DENSE, AMPERE, ON_AMPERE, id="dense on Ampere"),
        pytest.param(ENCODER, HOPPER, ON_HOPPER, id="an encoder"),
        pytest.param(ENCODER.evolve(sliding_window=512), BLACKWELL, ON_BLACKWELL, id="an encoder with a window"),
        pytest.param(CROSS, HOPPER, ON_HOPPER, id="cross attention"),
    ],
)
def test_who_serves_what_and_where(requirements: Requirements, device: Device, serving: str) -> None:
    verdicts = ask(requirements, device)

    assert [name for name, v in verdicts.items() if v.status in ("chosen", "eligible")] == serving.split()
    assert [name for name, v in verdicts.items() if v.status == "chosen"] == serving.split()[:1]
    assert set(verdicts) == set(VARIANTS)


UNMASKED = "the shared prefix is one pass of all queries over every cached key, whatever lies between them"
UNPLACED = "a rank holds every so many tokens of a context: a place among them is no position"
EMPTY = "of a request without cached keys the kernels write the sum of weights over those of others, or past the end"
QUANTIZED = "the kernels with scales read 8-bit queries, keys and values, 16 bytes at a time, and write bfloat16"


@pytest.mark.parametrize(
    ("requirements", "variant", "device", "told"),
    [
        pytest.param(
            LLAMA.evolve(sinks=True),
            "fa2",
            AMPERE,
            ["does not support sinks=True"],
            id="sinks on Ampere, by FlashAttention 2",
        ),
        pytest.param(
            LLAMA.evolve(sinks=True),
            "fa3_vllm",
            AMPERE,
            ["requires compute capability 9.0; the device has 8.0"],
            id="sinks on Ampere, by FlashAttention 3",
        ),
        pytest.param(
            LLAMA.evolve(sinks=True),
            "fa4",
            AMPERE,
            ["requires compute capability 9.0, 10.0f, 11.0; the device has 8.0"],
            id="sinks on Ampere, by FlashAttention 4",
        ),
        pytest.param(LLAMA.evolve(sinks=True), "fa3", HOPPER, ["does not support sinks=True"], id="sinks by fa3"),
        pytest.param(
            GPT_OSS.evolve(num_q_heads=128),
            "fa3_vllm",
            HOPPER,
            ["requires num_q_heads <= 64 (requested: num_q_heads=128): the kernels keep the sinks of 64 query heads"],
            id="sinks of many heads",
        ),
        pytest.param(
            GPT_OSS.evolve(dtype="float16"),
            "fa3_vllm",
            HOPPER,
            ["requires dtype = bfloat16 (requested: dtype=float16): the kernels read sinks in bfloat16"],
            id="sinks in float16",
        ),
        pytest.param(ALIBI, "fa3_vllm", HOPPER, ["does not support alibi=linear"], id="ALiBi by FlashAttention 3"),
        pytest.param(
            PAGES_16,
            "fa2",
            AMPERE,
            ["does not support block_size=16; supported: 256, multiples of 256"],
            id="pages of 16 by fa2",
        ),
        pytest.param(
            LLAMA.evolve(logits_soft_cap=30.0),
            "torch",
            HOPPER,
            ["does not support logits_soft_cap=30.0"],
            id="a soft cap by torch",
        ),
        pytest.param(
            GRAPHS,
            "torch",
            HOPPER,
            ["does not support cudagraph=uniform_batch; supported: never"],
            id="graphs by torch",
        ),
        pytest.param(
            LLAMA.evolve(cudagraph="always"),
            "fa4",
            HOPPER,
            ["does not support cudagraph=always; supported: <= uniform_batch"],
            id="graphs of any batch by FlashAttention 4",
        ),
        pytest.param(
            LLAMA.evolve(head_size=72),
            "fa4",
            HOPPER,
            [
                (
                    "requires head_size in multiples of 16 (requested: head_size=72): "
                    "pages of other sizes than a tile are read for whole 16 elements of a head"
                )
            ],
            id="odd heads in pages, by FlashAttention 4",
        ),
        pytest.param(
            LLAMA.evolve(head_size=160),
            "fa4",
            HOPPER,
            [
                (
                    "requires head_size <= 128, 192, 256 (requested: head_size=160): "
                    "the kernels for Hopper copy pages of "
                    "such heads in steps that do not add up to a tile, and attend what was there before"
                )
            ],
            id="heads of 160 in pages, by FlashAttention 4 on Hopper",
        ),
        pytest.param(
            CASCADE.evolve(head_size=80),
            "fa4",
            HOPPER,
            [
                (
                    "requires cascade = False (requested: cascade=True): "
                    "where every key is attended, tiles of such heads "
                    "have 144 keys, and pages are copied in steps that do not add up to them"
                )
            ],
            id="a shared prefix of heads of 80, by FlashAttention 4 on Hopper",
        ),
        pytest.param(
            LLAMA.evolve(head_size=192),
            "fa4",
            BLACKWELL,
            [
                (
                    "requires head_size <= 128, 256 (requested: head_size=192): "
                    "the kernels for Blackwell are made for heads up to 128, and of 256"
                )
            ],
            id="heads of 192 on Blackwell",
        ),
        pytest.param(
            LLAMA.evolve(head_size=256, batch_invariant=True),
            "fa4",
            BLACKWELL,
            [
                (
                    "requires head_size <= 128 (requested: head_size=256): "
                    "on Blackwell two blocks share a tile of heads of 256 where the batch is small"
                )
            ],
            id="heads of 256, batch-invariant, on Blackwell",
        ),
        pytest.param(
            FP8.evolve(dtype="float16"),
            "fa3",
            HOPPER,
            [f"requires dtype = bfloat16 (requested: dtype=float16): {QUANTIZED}"],
            id="an 8-bit cache beside float16",
        ),
        pytest.param(
            FP8.evolve(head_size=72),
            "fa3_vllm",
            HOPPER,
            [f"requires head_size in multiples of 16 (requested: head_size=72): {QUANTIZED}"],
            id="an 8-bit cache of odd heads",
        ),
        pytest.param(
            LLAMA.evolve(per_head_scales=True),
            "fa3",
            HOPPER,
            [
                (
                    "requires kv_cache_dtype = fp8_e4m3 (requested: kv_cache_dtype=bfloat16): "
                    "only caches of 8-bit floats have scales"
                ),
            ],
            id="scales of nothing",
        ),
        pytest.param(
            CASCADE.evolve(sliding_window=4096),
            "fa3",
            HOPPER,
            [f"requires no sliding_window (requested: sliding_window=4096): {UNMASKED}"],
            id="a shared prefix and a window",
        ),
        pytest.param(
            CASCADE.evolve(alibi="linear"),
            "fa2",
            HOPPER,
            [f"requires no alibi (requested: alibi=linear): {UNMASKED}"],
            id="a shared prefix and ALiBi",
        ),
        pytest.param(
            CASCADE.evolve(kv_cache_dtype="fp8"),
            "fa3_vllm",
            HOPPER,
            [
                (
                    "does not support cascade=True with kv_cache_dtype=fp8_e4m3: "
                    "shared prefixes are used, and checked, with caches in the dtype of the model alone"
                )
            ],
            id="a shared prefix and an 8-bit cache",
        ),
        pytest.param(
            CASCADE.evolve(batch_invariant=True),
            "fa3",
            HOPPER,
            [
                (
                    "requires batch_invariant = False (requested: batch_invariant=True): "
                    "which keys are a shared prefix follows from what else is in the batch"
                )
            ],
            id="a shared prefix, batch-invariant",
        ),
        pytest.param(
            DCP.evolve(sliding_window=4096),
            "fa3_vllm",
            HOPPER,
            [f"requires no sliding_window (requested: sliding_window=4096): {UNPLACED}"],
            id="ranks and a window",
        ),
        pytest.param(
            DCP.evolve(alibi="linear"),
            "fa2_vllm",
            HOPPER,
            [f"requires no alibi (requested: alibi=linear): {UNPLACED}", f"does not support dcp_size=2: {EMPTY}"],
            id="ranks and ALiBi",
        ),
        pytest.param(
            DCP.evolve(cascade=True),
            "fa4",
            HOPPER,
            [
                (
                    "requires cascade = False (requested: cascade=True): "
                    "the shared prefix would have to be found in the tokens that each rank holds"
                )
            ],
            id="ranks and a shared prefix",
        ),
        pytest.param(
            DCP.evolve(kv_sharing=True),
            "fa4",
            HOPPER,
            [
                (
                    "requires kv_sharing = False (requested: kv_sharing=True): "
                    "new tokens are attended as they come with the call, and a layer that shares a cache is given none"
                )
            ],
            id="ranks and a shared cache",
        ),
        pytest.param(
            CROSS.evolve(sliding_window=512),
            "fa3",
            HOPPER,
            [
                (
                    "does not support attn_type=encoder_decoder with sliding_window=512: "
                    "an encoder's tokens are at no distance from a decoder's: a window has no meaning there"
                )
            ],
            id="cross attention and a window",
        ),
        pytest.param(
            CROSS.evolve(alibi="linear"),
            "fa2",
            HOPPER,
            [
                (
                    "does not support attn_type=encoder_decoder with alibi=linear: "
                    "an encoder's tokens are at no distance from a decoder's: ALiBi has no meaning there"
                )
            ],
            id="cross attention and ALiBi",
        ),
        pytest.param(
            DENSE.evolve(cudagraph="uniform_batch"),
            "fa3",
            HOPPER,
            [
                (
                    "requires paged = True (requested: paged=False): "
                    "keys that come with the call differ in size from step to step, and a graph does not"
                )
            ],
            id="graphs without a cache",
        ),
    ],
)
def test_what_a_library_has_not_is_refused_with_its_reason(
    requirements: Requirements, variant: str, device: Device, told: list[str]
) -> None:
    assert refusals(requirements, variant, device) == told


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_chunk", 8192),
        ("custom_mask", True),
        ("head_size_v", 64),
        ("block_sparse", {"local_blocks": 16}),
        ("output_quant", "fp8_e4m3"),
        ("features", ("acme.rope_fused",)),
    ],
)
def test_what_is_not_declared_is_refused_by_its_name(field: str, value: object) -> None:
    verdicts = ask(LLAMA.evolve(**{field: value}), HOPPER)

    for variant in VARIANTS:
        (reason,) = verdicts[variant].reasons
        assert (reason.code, reason.field) == ("undeclared", field)


@pytest.mark.parametrize(
    ("device", "told"),
    [
        (TURING, "requires compute capability >= 8.0; the device has 7.5"),
        (AMD, "requires vendor nvidia; the device is from amd"),
        (CPU, "requires device type cuda; the device is cpu"),
    ],
    ids=str,
)
def test_a_device_is_refused_by_its_field(device: Device, told: str) -> None:
    assert told in refusals(LLAMA, "fa2", device)


def test_everything_that_stands_against_a_request_is_told_at_once() -> None:
    verdict = ask(GPT_OSS.evolve(alibi="linear", kv_cache_dtype="fp8", cascade=True), TURING)["fa4"]

    assert {reason.field.partition(" and ")[0] for reason in verdict.reasons} == {
        "compute_capability",
        "alibi",
        "kv_cache_dtype",
        "sliding_window",
        "cascade",
    }


def test_an_older_device_with_sinks_has_a_newer_one_as_its_way_out() -> None:
    assert str(ask(GPT_OSS, AMPERE)["fa4"].fix) == "run on cuda:9.0"


@pytest.mark.parametrize(
    ("variant", "device", "size"),
    [
        ("fa2", AMPERE, 256),
        ("fa2_vllm", AMPERE, 16),
        ("fa3", HOPPER, 16),
        ("fa3_vllm", HOPPER, 16),
        ("fa4", HOPPER, 16),
    ],
)
def test_what_is_left_open_is_agreed_on(variant: str, device: Device, size: int) -> None:
    agreed = ask(LLAMA, device)[variant].agreement

    assert agreed is not None
    assert (agreed.block_size, agreed.kv_layout, agreed.options) == (size, "NHD", {})
    assert agreed.cudagraph == ("always" if variant.startswith("fa3") else "uniform_batch")


@pytest.mark.parametrize("attn_type", ["decoder", "encoder", "encoder_only"])
def test_keys_that_come_with_the_call_have_the_dtype_of_the_model(attn_type: str) -> None:
    with pytest.raises(RequirementsError, match="only a paged cache has a dtype of its own"):
        DENSE.evolve(attn_type=attn_type, kv_cache_dtype="fp8")


def test_a_dense_request_agrees_on_no_graphs() -> None:
    agreed = ask(DENSE, HOPPER)["fa3"].agreement

    assert agreed is not None
    assert (agreed.cudagraph, agreed.block_size) == ("never", None)


@pytest.mark.parametrize("device", [AMPERE, HOPPER, BLACKWELL, GEFORCE], ids=str)
def test_packed_pages_come_after_every_cache_that_is_read_as_it_is(device: Device) -> None:
    """Behind another backend's too: the number of emulated features counts before any order of backends."""
    manifest = read_manifest(MANIFEST)
    made = {
        variant.name: make_candidate(manifest, variant, lambda _: None, assume_installed=True)
        for variant in manifest.variants
    }
    packing, policy = made.pop("torch"), Policy(orders=read_known().orders)
    others = [*made.values(), *(evolve(each, id=f"zebra/{name}", backend="zebra") for name, each in made.items())]

    for other in others:
        ranked = rank([evaluate(each, Request(LLAMA, device)) for each in (packing, other)], policy)
        assert [each.candidate for each in ranked.evaluations] == [other, packing]
        assert ranked.decided_by == "fewest emulated features"


def test_on_hopper_another_measured_backend_comes_behind_flash_attention_3_alone() -> None:
    """Other variants of this one come behind it, where their kernels were slower; packing comes last as ever."""
    manifest = read_manifest(MANIFEST)
    made = [make_candidate(manifest, each, lambda _: None, assume_installed=True) for each in manifest.variants]
    packing = next(each for each in made if each.id == "flash_attn/torch")
    other = evolve(next(each for each in made if each.id == "flash_attn/fa4"), id="flashinfer/a", backend="flashinfer")
    serving = [each for each in made if each is not packing]

    request = Request(LLAMA, HOPPER)

    ranked = rank(
        [evaluate(each, request) for each in (other, packing, *reversed(serving))], Policy(orders=read_known().orders)
    )

    assert [each.candidate.id.replace("flash_attn/", "") for each in ranked.evaluations] == [
        "fa3_vllm",
        "fa3",
        "flashinfer/a",
        "fa4",
        "fa2",
        "fa2_vllm",
        "torch",
    ]
    assert ranked.decided_by == "default order"


@pytest.mark.parametrize(
    ("requirements", "device", "chosen", "others"),
    [
        pytest.param(
            ALIBI,
            HOPPER,
            "fa2",
            {
                "fa3": ["does not support alibi=linear"],
                "fa3_vllm": ["does not support alibi=linear"],
                "fa4": ["does not support alibi=linear"],
                "torch": ["does not support alibi=linear"],
            },
            id="ALiBi",
        ),
        pytest.param(
            LLAMA.evolve(sinks=True),
            HOPPER,
            "fa3_vllm",
            {name: ["does not support sinks=True"] for name in ("fa2", "fa2_vllm", "fa3", "torch")},
            id="sinks on Hopper",
        ),
        pytest.param(
            LLAMA.evolve(sinks=True),
            BLACKWELL,
            "fa4",
            {
                "fa2": ["does not support sinks=True"],
                "fa3_vllm": ["requires compute capability 9.0; the device has 10.0"],
            },
            id="sinks on Blackwell",
        ),
        pytest.param(
            PAGES_16,
            HOPPER,
            "fa3_vllm",
            {"fa2": ["does not support block_size=16; supported: 256, multiples of 256"]},
            id="pages of 16",
        ),
        pytest.param(LLAMA, HOPPER, "fa3_vllm", {}, id="Hopper"),
        pytest.param(
            LLAMA,
            BLACKWELL,
            "fa4",
            {name: ["requires compute capability 9.0; the device has 10.0"] for name in ("fa3", "fa3_vllm")},
            id="Blackwell",
        ),
        pytest.param(
            LLAMA.evolve(sinks=True),
            AMPERE,
            None,
            {
                "fa2": ["does not support sinks=True"],
                "fa2_vllm": ["does not support sinks=True"],
                "fa3": [
                    "does not support sinks=True",
                    "requires compute capability 9.0; the device has 8.0",
                ],
                "fa3_vllm": ["requires compute capability 9.0; the device has 8.0"],
                "fa4": ["requires compute capability 9.0, 10.0f, 11.0; the device has 8.0"],
                "torch": ["does not support sinks=True"],
            },
            id="sinks on Ampere",
        ),
    ],
)
def test_variants_are_told_apart_and_every_other_one_says_why_not(
    requirements: Requirements, device: Device, chosen: str | None, others: dict[str, list[str]]
) -> None:
    """Of each that is refused all reasons, and of nobody else any."""
    verdicts = ask(requirements, device)

    assert [name for name, v in verdicts.items() if v.status == "chosen"] == ([chosen] if chosen else [])
    told = {name: [str(reason) for reason in v.reasons] for name, v in verdicts.items() if v.status == "refused"}
    assert {name: told[name] for name in others} == others
    assert all(told.values())
    assert chosen not in told


@pytest.mark.parametrize(
    ("device", "order"), [(HOPPER, ["fa3", "fa4", "fa2"]), (BLACKWELL, ["fa4", "fa2"]), (AMPERE, ["fa2"])], ids=str
)
def test_newer_kernels_come_first_where_a_device_has_them(device: Device, order: list[str]) -> None:
    verdicts = ask(LLAMA.evolve(block_size=256), device)
    serving = [name for name, v in verdicts.items() if v.status in ("chosen", "eligible")]

    assert [name for name in serving if name in ("fa2", "fa3", "fa4")] == order


def test_the_extras_install_what_the_manifest_requires() -> None:
    project = parse_toml((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = {
        text
        for name, texts in project["optional-dependencies"].items()
        if name not in {"bench", "test"}
        for text in texts
    }
    required = {text.replace(" ", "") for variant in read_manifest(MANIFEST).variants for text in variant.requires}

    assert extras <= required
    assert {requirement_name(text) for text in required - extras} == {"flash-attn-3", "torch"}  # on no index; there


def fixes() -> dict[str, Fix]:
    """What is told of each variant, on a device that it serves, where no library is installed."""
    manifest = read_manifest(MANIFEST)
    found = {each.name: make_candidate(manifest, each, lambda _: None) for each in manifest.variants}
    asked = Request(LLAMA.evolve(block_size=256), HOPPER)
    return {name: find_fix(candidate, asked) for name, candidate in found.items()}


def test_libraries_are_installed_in_the_way_that_gets_them() -> None:
    found = fixes()
    by_name = {name: fix.install for name, fix in found.items() if not fix.action}
    words = {name: fix.action for name, fix in found.items() if fix.action}

    assert by_name == {
        "fa2_vllm": ("vllm >=0.19",),
        "fa3_vllm": ("vllm >=0.19",),
        "fa4": ("flash-attn-4 >=4.0.0b11,<4.1",),  # whose releases are all betas: the bound lets pip take one
        "torch": ("torch >=2.11",),
    }
    assert [(name, found[name].install) for name in words] == [("fa2", ()), ("fa3", ())]


def test_what_is_compiled_is_compiled_against_the_torch_that_is_there() -> None:
    action = fixes()["fa2"].action
    (required,) = next(each.requires for each in read_manifest(MANIFEST).variants if each.name == "fa2")

    assert action.startswith(f"install {required}: pip install --no-build-isolation '{required}', since ")


def test_what_is_on_no_index_is_got_from_its_sources() -> None:
    action = fixes()["fa3"].action

    assert action.startswith("install flash-attn-3 >=3.0.0b1,<4: pip install --no-build-isolation 'git+https://")
    assert "/Dao-AILab/flash-attention#subdirectory=hopper'" in action
    assert "pip install flash-attn-3" not in action
    assert "pip install 'flash-attn-3" not in action


def test_check_finds_nothing_in_the_project() -> None:
    report = examine(str(PROJECT))

    assert report.backends == ("flash_attn",)
    assert report.findings == ()
