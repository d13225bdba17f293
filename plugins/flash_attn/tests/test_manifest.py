"""What the manifest supports and refuses, by request and device, and why. Nothing is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

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
from attnplug.request.settings import parse_toml
from attnplug_kit.check.examine import examine
from plugins.flash_attn.tests.real import FLASH_ATTN
from tests.backends.plugin import in_short

if TYPE_CHECKING:
    from attnplug.negotiation.reason import Fix

PROJECT = Path(__file__).parents[1]
MANIFEST = PROJECT / "src" / "attnplug_flash_attn" / "attnplug.toml"
TURING, AMPERE, HOPPER, BLACKWELL, B300, THOR, GEFORCE = (
    Device.cuda(capability) for capability in ("7.5", "8.0", "9.0", "10.0", "10.3", "11.0", "12.0")
)
AMD, CPU = Device("cuda", vendor="amd"), Device.cpu()
VARIANTS = ("fa2", "fa2_vllm", "fa3", "fa3_vllm", "fa3_tokenspeed", "fa4", "torch")

LLAMA = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
PAGES_16 = LLAMA.evolve(block_size=16)
GRAPHS = LLAMA.evolve(cudagraph="uniform_batch")
GEMMA_2 = LLAMA.evolve(head_size=256, num_q_heads=16, logits_soft_cap=50.0, sliding_window=4096)
GPT_OSS = LLAMA.evolve(head_size=64, num_q_heads=64, sinks=True, sliding_window=128)
ALIBI = LLAMA.evolve(alibi="linear")
SINKS = LLAMA.evolve(sinks=True)
FP8 = LLAMA.evolve(kv_cache_dtype="fp8")
CASCADE = LLAMA.evolve(cascade=True, return_lse=True)
DCP = LLAMA.evolve(dcp_size=2)
LATENT = LLAMA.evolve(head_size=576, head_size_v=512, num_q_heads=128, num_kv_heads=1, latent=True)
LATENT_256 = LATENT.evolve(head_size=320, head_size_v=256)
UNCOMPRESSED = LLAMA.evolve(head_size=192, head_size_v=128, num_q_heads=128, num_kv_heads=128, paged=False)
CROSS = LLAMA.evolve(attn_type="encoder_decoder")
DENSE = LLAMA.evolve(paged=False)
ENCODER = DENSE.evolve(attn_type="encoder_only")

ON_AMPERE = "fa2_vllm fa2 torch"
ON_HOPPER = "fa3_vllm fa3 fa3_tokenspeed fa4 fa2 fa2_vllm torch"
WITHOUT_INDEX = ON_HOPPER.replace(" fa3_tokenspeed", "")  # for requests that this build has no kernels for
ON_BLACKWELL = "fa4 fa2 fa2_vllm torch"
NONE = ""


_registered = FLASH_ATTN.registered_fixture()
verdicts_of = FLASH_ATTN.verdicts_of


def refusals(requirements: Requirements, variant: str, device: Device = HOPPER) -> list[str]:
    return FLASH_ATTN.refusals(requirements, variant, device)


@pytest.mark.parametrize(
    ("requirements", "device", "serving"),
    [
        pytest.param(LLAMA, TURING, NONE, id="Llama on Turing"),
        pytest.param(LLAMA, AMPERE, ON_AMPERE, id="Llama on Ampere"),
        pytest.param(LLAMA, HOPPER, ON_HOPPER, id="Llama on Hopper"),
        pytest.param(LLAMA, BLACKWELL, ON_BLACKWELL, id="Llama on a B200"),
        pytest.param(LLAMA, B300, ON_BLACKWELL, id="Llama on a B300"),
        pytest.param(LLAMA, THOR, ON_BLACKWELL, id="Llama on Thor"),
        pytest.param(LLAMA, GEFORCE, "fa2 fa2_vllm torch", id="Llama on a GeForce of that generation"),
        pytest.param(LLAMA, AMD, NONE, id="Llama on an AMD GPU"),
        pytest.param(LLAMA, CPU, NONE, id="Llama on the CPU"),
        pytest.param(LLAMA.evolve(dtype="float16"), HOPPER, ON_HOPPER, id="float16"),
        pytest.param(LLAMA.evolve(dtype="float32"), HOPPER, NONE, id="float32"),
        pytest.param(LLAMA.evolve(head_size=80), HOPPER, WITHOUT_INDEX, id="heads of 80"),
        pytest.param(LLAMA.evolve(head_size=72), HOPPER, "fa3_vllm fa3 fa2 fa2_vllm torch", id="heads of 72"),
        pytest.param(DENSE.evolve(head_size=72), HOPPER, WITHOUT_INDEX, id="heads of 72 without a KV cache"),
        pytest.param(LLAMA.evolve(head_size=100), HOPPER, NONE, id="heads of 100"),
        pytest.param(LLAMA.evolve(head_size=264), HOPPER, NONE, id="heads of 264"),
        pytest.param(LLAMA.evolve(head_size=256), BLACKWELL, ON_BLACKWELL, id="heads of 256 on Blackwell"),
        pytest.param(LLAMA.evolve(head_size=192), BLACKWELL, "fa2 fa2_vllm torch", id="heads of 192 on Blackwell"),
        pytest.param(PAGES_16, AMPERE, "fa2_vllm torch", id="pages of 16 on Ampere"),
        pytest.param(PAGES_16, HOPPER, "fa3_vllm fa3 fa3_tokenspeed fa4 fa2_vllm torch", id="pages of 16 on Hopper"),
        pytest.param(PAGES_16, BLACKWELL, "fa4 fa2_vllm torch", id="pages of 16 on Blackwell"),
        pytest.param(LLAMA.evolve(block_size=24), HOPPER, "torch", id="pages of 24"),
        pytest.param(
            LLAMA.evolve(block_size=128), HOPPER, "fa3_vllm fa3 fa3_tokenspeed fa2_vllm torch", id="pages of a tile"
        ),
        pytest.param(LLAMA.evolve(block_size=256), HOPPER, ON_HOPPER, id="pages of 256"),
        pytest.param(LLAMA.evolve(block_size=512), AMPERE, ON_AMPERE, id="pages of 512"),
        pytest.param(LLAMA.evolve(block_size=384), AMPERE, "fa2_vllm torch", id="pages of 384"),
        pytest.param(ALIBI, AMPERE, "fa2_vllm fa2", id="ALiBi on Ampere"),
        pytest.param(ALIBI, HOPPER, "fa2 fa2_vllm", id="ALiBi on Hopper"),
        pytest.param(ALIBI.evolve(block_size=16), BLACKWELL, "fa2_vllm", id="ALiBi in pages of 16 on Blackwell"),
        pytest.param(ALIBI.evolve(return_lse=True), HOPPER, "fa2 fa2_vllm", id="ALiBi with LSE"),
        pytest.param(LLAMA.evolve(alibi="sqrt"), HOPPER, NONE, id="ALiBi with square-root slopes"),
        pytest.param(GPT_OSS, AMPERE, NONE, id="gpt-oss on Ampere"),
        pytest.param(GPT_OSS, HOPPER, "fa3_vllm fa3_tokenspeed fa4", id="gpt-oss on Hopper"),
        pytest.param(GPT_OSS, BLACKWELL, "fa4", id="gpt-oss on Blackwell"),
        pytest.param(GPT_OSS, GEFORCE, NONE, id="gpt-oss on a GeForce"),
        pytest.param(GPT_OSS.evolve(num_q_heads=128), HOPPER, "fa4", id="sinks of 128 heads"),
        pytest.param(GPT_OSS.evolve(dtype="float16"), HOPPER, "fa4", id="sinks in float16"),
        pytest.param(GPT_OSS.evolve(alibi="linear"), HOPPER, NONE, id="sinks and ALiBi"),
        pytest.param(GEMMA_2, HOPPER, "fa3_vllm fa3 fa4 fa2 fa2_vllm", id="Gemma 2 on Hopper"),
        pytest.param(GEMMA_2, AMPERE, "fa2_vllm fa2", id="Gemma 2 on Ampere"),
        pytest.param(FP8, HOPPER, "fa3_vllm fa3 fa3_tokenspeed", id="an FP8 KV cache on Hopper"),
        pytest.param(FP8.evolve(per_head_scales=True), HOPPER, "fa3_vllm fa3 fa3_tokenspeed", id="scales per head"),
        pytest.param(FP8.evolve(unquantized_queries=True), HOPPER, NONE, id="queries as they are beside FP8"),
        pytest.param(LLAMA.evolve(unquantized_queries=True), HOPPER, ON_HOPPER, id="queries as they are"),
        pytest.param(FP8, BLACKWELL, NONE, id="an FP8 KV cache on Blackwell"),
        pytest.param(LLAMA.evolve(kv_cache_dtype="fp8_e5m2"), HOPPER, NONE, id="fp8_e5m2"),
        pytest.param(LLAMA.evolve(kv_cache_dtype="int8"), HOPPER, NONE, id="an int8 cache"),
        pytest.param(FP8.evolve(sinks=True), HOPPER, "fa3_vllm fa3_tokenspeed", id="an FP8 KV cache with sinks"),
        pytest.param(
            FP8.evolve(dcp_size=2), HOPPER, "fa3_vllm fa3 fa3_tokenspeed", id="an FP8 KV cache over two ranks"
        ),
        pytest.param(GRAPHS, HOPPER, "fa3_vllm fa3 fa3_tokenspeed fa4 fa2 fa2_vllm", id="graphs of decodes"),
        pytest.param(
            GRAPHS.evolve(cudagraph="always"), HOPPER, "fa3_vllm fa3 fa3_tokenspeed", id="graphs of any batch"
        ),
        pytest.param(GRAPHS.evolve(cudagraph="always"), BLACKWELL, NONE, id="graphs of any batch on Blackwell"),
        pytest.param(CASCADE, HOPPER, ON_HOPPER, id="a shared prefix"),
        pytest.param(
            CASCADE.evolve(sinks=True), HOPPER, "fa3_vllm fa3_tokenspeed fa4", id="a shared prefix with sinks"
        ),
        pytest.param(DCP, HOPPER, "fa3_vllm fa3 fa3_tokenspeed fa4 torch", id="two ranks"),
        pytest.param(DCP, AMPERE, "torch", id="two ranks on Ampere"),
        pytest.param(DCP.evolve(sinks=True), HOPPER, "fa3_vllm fa3_tokenspeed fa4", id="two ranks with sinks"),
        pytest.param(
            DCP.evolve(dcp_size=4, cudagraph="always"), HOPPER, "fa3_vllm fa3 fa3_tokenspeed", id="four ranks in graphs"
        ),
        pytest.param(LLAMA.evolve(batch_invariant=True), HOPPER, ON_HOPPER, id="batch-invariant on Hopper"),
        pytest.param(
            LLAMA.evolve(batch_invariant=True), BLACKWELL, "fa2 fa2_vllm torch", id="batch-invariant on a B200"
        ),
        pytest.param(LLAMA.evolve(batch_invariant=True), B300, "fa2 fa2_vllm torch", id="batch-invariant on a B300"),
        pytest.param(GPT_OSS.evolve(batch_invariant=True), BLACKWELL, NONE, id="batch-invariant with sinks on a B200"),
        pytest.param(LLAMA.evolve(decode_query_len=4), AMPERE, ON_AMPERE, id="decodes of four tokens"),
        pytest.param(LLAMA.evolve(seq_lens_cpu_kind="absent"), AMPERE, ON_AMPERE, id="no CPU sequence lengths"),
        pytest.param(LLAMA.evolve(kv_sharing=True), HOPPER, ON_HOPPER, id="the KV cache of another layer"),
        pytest.param(LLAMA.evolve(kv_in_cache=True), HOPPER, ON_HOPPER, id="calls without K/V"),
        pytest.param(LLAMA.evolve(causal=False), HOPPER, ON_HOPPER, id="bidirectional over a KV cache"),
        pytest.param(LLAMA.evolve(kv_layout="HND"), HOPPER, ON_HOPPER, id="HND"),
        pytest.param(DENSE, HOPPER, ON_HOPPER, id="dense on Hopper"),
        pytest.param(DENSE, AMPERE, ON_AMPERE, id="dense on Ampere"),
        pytest.param(ENCODER, HOPPER, ON_HOPPER, id="an encoder"),
        pytest.param(ENCODER.evolve(sliding_window=512), BLACKWELL, ON_BLACKWELL, id="an encoder with a window"),
        pytest.param(CROSS, HOPPER, ON_HOPPER, id="cross attention"),
        pytest.param(LATENT, HOPPER, "fa3_vllm", id="latents of 512"),
        pytest.param(LATENT_256.evolve(dtype="float16"), HOPPER, "fa3_vllm", id="latents of 256 in float16"),
        pytest.param(LATENT.evolve(block_size=64, cudagraph="always"), HOPPER, "fa3_vllm", id="latents in graphs"),
        pytest.param(
            LATENT.evolve(sliding_window=512, logits_soft_cap=30.0), HOPPER, "fa3_vllm", id="latents, window, soft cap"
        ),
        pytest.param(LATENT, AMPERE, NONE, id="latents on Ampere"),
        pytest.param(UNCOMPRESSED.evolve(return_lse=True), HOPPER, "fa3_vllm", id="uncompressed latents"),
        pytest.param(UNCOMPRESSED.evolve(causal=False), HOPPER, "fa3_vllm", id="uncompressed latents of a prefix"),
        pytest.param(
            UNCOMPRESSED.evolve(head_size=256, head_size_v=256, return_lse=True), HOPPER, ON_HOPPER, id="keys of 256"
        ),
    ],
)
def test_variants_that_support_a_request(requirements: Requirements, device: Device, serving: str) -> None:
    verdicts = verdicts_of(requirements, device)

    assert [name for name, v in verdicts.items() if v.status in ("chosen", "eligible")] == serving.split()
    assert [name for name, v in verdicts.items() if v.status == "chosen"] == serving.split()[:1]
    assert set(verdicts) == set(VARIANTS)


CAPABILITY = "compute_capability supported: 9.0"
EVERY_KEY = "the prefix pass attends to every key of the prefix, without a mask and without a bias by position"
NOT_A_POSITION = "a rank holds interleaved tokens of a context, and an index among them is not a position"
EMPTY = "for a request without cached keys the kernels write the LSE over that of other requests, or past the end"
QUANTIZED = "the FP8 kernels read FP8 queries, keys and values 16 bytes at a time, and write bfloat16"
PART_OF_A_TILE = (
    "the Hopper kernels copy pages of these heads in steps that do not add up to a tile, and the rest of the tile is "
    "stale data"
)
TILE_OF_144 = (
    "without a causal mask tiles of these heads have 144 keys, and pages are copied in steps that do not add up to them"
)
SHARD = "new tokens are read from the K/V of the call, since a rank's pages have only its own shard of them"
SHARED_CACHE = "new tokens are read from the K/V of the call, and a layer that shares a KV cache has none"
FIXED_SIZES = "contiguous (non-paged) K/V differ in size from step to step, and a CUDA graph has fixed sizes"
CHECKED_ON_HOPPER = (
    "batch invariance was checked on compute capability 9.0 only; on Blackwell the library schedules by the shape of "
    "the batch"
)
LATENT_SIZES = "the kernels support head sizes up to 256, and latents of 256 or 512 elements beside 64 rotary ones"
ROTARY = "the kernels for latents require 64 rotary elements"
ONE_PAIR = "keys of 192 with values of 128 are the only tested pair of unequal sizes"
EVEN = "the kernels support no sinks where keys and values differ in size"
UNDEFINED = "the relative position of encoder and decoder tokens is undefined, so"

REFUSED: dict[str, tuple[Requirements, str, Device, list[str]]] = {
    "sinks on Ampere, FlashAttention 2": (SINKS, "fa2", AMPERE, ["sinks undeclared"]),
    "sinks on Ampere, FlashAttention 3": (SINKS, "fa3_vllm", AMPERE, [CAPABILITY]),
    "sinks on Ampere, FlashAttention 4": (SINKS, "fa4", AMPERE, [f"{CAPABILITY}, 10.0f, 11.0"]),
    "sinks, fa3": (SINKS, "fa3", HOPPER, ["sinks undeclared"]),
    "sinks of many heads": (
        GPT_OSS.evolve(num_q_heads=128),
        "fa3_vllm",
        HOPPER,
        ["num_q_heads: the kernels support the sinks of at most 64 query heads"],
    ),
    "soft-capping, fa3_tokenspeed": (GEMMA_2, "fa3_tokenspeed", HOPPER, ["logits_soft_cap undeclared"]),
    "heads of 96, fa3_tokenspeed": (
        LLAMA.evolve(head_size=96),
        "fa3_tokenspeed",
        HOPPER,
        ["head_size supported: multiples of 8 up to 64, multiples of 8 from 104 up to 256"],
    ),
    "sinks of many heads, fa3_tokenspeed": (
        GPT_OSS.evolve(num_q_heads=128),
        "fa3_tokenspeed",
        HOPPER,
        ["num_q_heads: the kernels support the sinks of at most 64 query heads"],
    ),
    "sinks in float16, fa3_tokenspeed": (
        GPT_OSS.evolve(dtype="float16"),
        "fa3_tokenspeed",
        HOPPER,
        ["dtype: the kernels read sinks in bfloat16"],
    ),
    "sinks in float16": (
        GPT_OSS.evolve(dtype="float16"),
        "fa3_vllm",
        HOPPER,
        ["dtype: the kernels read sinks in bfloat16"],
    ),
    "ALiBi, FlashAttention 3": (ALIBI, "fa3_vllm", HOPPER, ["alibi undeclared"]),
    "pages of 16, fa2": (PAGES_16, "fa2", AMPERE, ["block_size supported: 256, multiples of 256"]),
    "soft-capping, torch": (LLAMA.evolve(logits_soft_cap=30.0), "torch", HOPPER, ["logits_soft_cap undeclared"]),
    "graphs, torch": (GRAPHS, "torch", HOPPER, ["cudagraph undeclared"]),
    "graphs of any batch, FlashAttention 4": (
        LLAMA.evolve(cudagraph="always"),
        "fa4",
        HOPPER,
        ["cudagraph supported: <= uniform_batch"],
    ),
    "heads of 72 in pages, FlashAttention 4": (
        LLAMA.evolve(head_size=72),
        "fa4",
        HOPPER,
        ["head_size: pages that are not as large as a tile are read 16 elements of a head at a time"],
    ),
    "heads of 160 in pages, FlashAttention 4 on Hopper": (
        LLAMA.evolve(head_size=160),
        "fa4",
        HOPPER,
        [f"head_size: {PART_OF_A_TILE}"],
    ),
    "a shared prefix of heads of 80, FlashAttention 4 on Hopper": (
        CASCADE.evolve(head_size=80),
        "fa4",
        HOPPER,
        [f"cascade: {TILE_OF_144}"],
    ),
    "heads of 192 on Blackwell": (
        LLAMA.evolve(head_size=192),
        "fa4",
        BLACKWELL,
        ["head_size: the Blackwell kernels support head sizes up to 128, and 256"],
    ),
    "batch-invariant on Blackwell": (
        LLAMA.evolve(batch_invariant=True),
        "fa4",
        BLACKWELL,
        [f"compute_capability: {CHECKED_ON_HOPPER}"],
    ),
    "batch-invariant on Thor": (
        LLAMA.evolve(batch_invariant=True),
        "fa4",
        THOR,
        [f"compute_capability: {CHECKED_ON_HOPPER}"],
    ),
    "an FP8 KV cache and float16": (FP8.evolve(dtype="float16"), "fa3", HOPPER, [f"dtype: {QUANTIZED}"]),
    "an FP8 KV cache of heads of 72": (FP8.evolve(head_size=72), "fa3_vllm", HOPPER, [f"head_size: {QUANTIZED}"]),
    "scales without an FP8 KV cache": (
        LLAMA.evolve(per_head_scales=True),
        "fa3",
        HOPPER,
        ["kv_cache_dtype: only an FP8 KV cache has scales"],
    ),
    "a shared prefix and a window": (
        CASCADE.evolve(sliding_window=4096),
        "fa3",
        HOPPER,
        [f"sliding_window: {EVERY_KEY}"],
    ),
    "a shared prefix and ALiBi": (CASCADE.evolve(alibi="linear"), "fa2", HOPPER, [f"alibi: {EVERY_KEY}"]),
    "a shared prefix and an FP8 KV cache": (
        CASCADE.evolve(kv_cache_dtype="fp8"),
        "fa3_vllm",
        HOPPER,
        ["cascade and kv_cache_dtype: shared prefixes are tested with a KV cache in the model's dtype only"],
    ),
    "a shared prefix, batch-invariant": (
        CASCADE.evolve(batch_invariant=True),
        "fa3",
        HOPPER,
        ["batch_invariant: the shared prefix depends on the other requests of the batch"],
    ),
    "DCP and a window": (
        DCP.evolve(sliding_window=4096),
        "fa3_vllm",
        HOPPER,
        [f"sliding_window: {NOT_A_POSITION}"],
    ),
    "DCP and ALiBi": (
        DCP.evolve(alibi="linear"),
        "fa2_vllm",
        HOPPER,
        [f"alibi: {NOT_A_POSITION}", f"dcp_size: {EMPTY}"],
    ),
    "DCP and a shared prefix": (
        DCP.evolve(cascade=True),
        "fa4",
        HOPPER,
        ["cascade: a prefix pass over a KV cache that is distributed over ranks is not implemented"],
    ),
    "DCP and calls without K/V": (
        DCP.evolve(kv_in_cache=True),
        "fa4",
        HOPPER,
        [f"kv_in_cache: {SHARD}"],
    ),
    "DCP and a shared KV cache": (DCP.evolve(kv_sharing=True), "fa4", HOPPER, [f"kv_sharing: {SHARED_CACHE}"]),
    "cross attention and a window": (
        CROSS.evolve(sliding_window=512),
        "fa3",
        HOPPER,
        [f"attn_type and sliding_window: {UNDEFINED} a window has no meaning"],
    ),
    "cross attention and ALiBi": (
        CROSS.evolve(alibi="linear"),
        "fa2",
        HOPPER,
        [f"attn_type and alibi: {UNDEFINED} ALiBi has no meaning"],
    ),
    "heads of 576 that are no latents": (LLAMA.evolve(head_size=576), "fa3_vllm", HOPPER, [f"latent: {LATENT_SIZES}"]),
    "short latents": (
        LATENT.evolve(head_size=192, head_size_v=128),
        "fa3_vllm",
        HOPPER,
        ["latent and head_size: the kernels for latents support 512 or 256 elements beside 64 rotary ones"],
    ),
    "latents without rotary elements": (
        LATENT.evolve(head_size=576, head_size_v=576),
        "fa3_vllm",
        HOPPER,
        [f"latent and head_size and head_size_v: {ROTARY}"],
    ),
    "latents of 512 with other rotary elements": (
        LATENT.evolve(head_size_v=256),
        "fa3_vllm",
        HOPPER,
        [f"latent and head_size and head_size_v: {ROTARY}"],
    ),
    "latents of 256 with other rotary elements": (
        LATENT_256.evolve(head_size_v=128),
        "fa3_vllm",
        HOPPER,
        [f"latent and head_size and head_size_v: {ROTARY}"],
    ),
    "latents in an FP8 KV cache": (
        LATENT.evolve(kv_cache_dtype="fp8"),
        "fa3_vllm",
        HOPPER,
        ["latent and kv_cache_dtype: the kernels for latents support bfloat16 and float16 only"],
    ),
    "latents and sinks": (
        LATENT.evolve(num_q_heads=16, sinks=True),
        "fa3_vllm",
        HOPPER,
        [f"sinks and head_size_v: {EVEN}"],
    ),
    "latents and DCP": (
        LATENT.evolve(dcp_size=2),
        "fa3_vllm",
        HOPPER,
        ["latent and dcp_size: the engine gathers the heads of latents, and merges the outputs of the ranks by LSE"],
    ),
    "latents, fa3_tokenspeed": (
        LATENT,
        "fa3_tokenspeed",
        HOPPER,
        [
            "head_size supported: multiples of 8 up to 64, multiples of 8 from 104 up to 256",
            "head_size_v undeclared",
            "latent undeclared",
        ],
    ),
    "other pairs of sizes": (
        LLAMA.evolve(head_size=64, head_size_v=256),
        "fa3_vllm",
        HOPPER,
        [f"latent and head_size_v and head_size: {ONE_PAIR}"],
    ),
    "values of 256 with keys of 192": (
        UNCOMPRESSED.evolve(head_size_v=256),
        "fa3_vllm",
        HOPPER,
        [f"latent and head_size and head_size_v: {ONE_PAIR}"],
    ),
    "sinks and 192/128": (
        UNCOMPRESSED.evolve(num_q_heads=16, num_kv_heads=16, sinks=True),
        "fa3_vllm",
        HOPPER,
        [f"sinks and head_size_v: {EVEN}"],
    ),
    "graphs without a KV cache": (
        DENSE.evolve(cudagraph="uniform_batch"),
        "fa3",
        HOPPER,
        [f"paged: {FIXED_SIZES}"],
    ),
}


@pytest.mark.parametrize(("requirements", "variant", "device", "reasons"), REFUSED.values(), ids=REFUSED)
def test_refusals_have_their_reasons(
    requirements: Requirements, variant: str, device: Device, reasons: list[str]
) -> None:
    assert refusals(requirements, variant, device) == reasons


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_chunk", 8192),
        ("custom_mask", True),
        ("block_sparse", {"local_blocks": 16}),
        ("output_quant", "fp8_e4m3"),
        ("features", ("acme.rope_fused",)),
    ],
)
def test_undeclared_fields_are_refused(field: str, value: object) -> None:
    verdicts = verdicts_of(LLAMA.evolve(**{field: value}), HOPPER)

    for variant in VARIANTS:
        (reason,) = verdicts[variant].reasons
        assert (reason.code, reason.field) == ("undeclared", field)


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (TURING, "compute_capability supported: >= 8.0"),
        (AMD, "vendor undeclared"),
        (CPU, "device_type supported: cuda"),
    ],
    ids=str,
)
def test_unsupported_devices_are_refused(device: Device, reason: str) -> None:
    assert reason in refusals(LLAMA, "fa2", device)


def test_a_refusal_has_every_reason() -> None:
    reasons = refusals(GPT_OSS.evolve(alibi="linear", kv_cache_dtype="fp8", cascade=True), "fa4", TURING)

    assert {re.match(r"\w+", reason)[0] for reason in reasons} == {
        "compute_capability",
        "alibi",
        "kv_cache_dtype",
        "sliding_window",
        "cascade",
    }


def test_the_fix_for_sinks_on_an_older_device_is_a_newer_one() -> None:
    assert verdicts_of(GPT_OSS, AMPERE)["fa4"].fix.device == HOPPER


@pytest.mark.parametrize(
    ("variant", "device", "size"),
    [
        ("fa2", AMPERE, 256),
        ("fa2_vllm", AMPERE, 16),
        ("fa3", HOPPER, 16),
        ("fa3_vllm", HOPPER, 16),
        ("fa3_tokenspeed", HOPPER, 16),
        ("fa4", HOPPER, 16),
    ],
)
def test_free_fields_are_agreed_on(variant: str, device: Device, size: int) -> None:
    agreed = verdicts_of(LLAMA, device)[variant].agreement

    assert agreed is not None
    assert (agreed.block_size, agreed.kv_layout, agreed.options) == (size, "NHD", {})
    assert agreed.cudagraph == ("always" if variant.startswith("fa3") else "uniform_batch")


@pytest.mark.parametrize("attn_type", ["decoder", "encoder", "encoder_only"])
def test_contiguous_keys_have_the_dtype_of_the_model(attn_type: str) -> None:
    with pytest.raises(RequirementsError, match="only a paged KV cache has another dtype than the layer"):
        DENSE.evolve(attn_type=attn_type, kv_cache_dtype="fp8")


def test_dense_agreements_have_no_graphs() -> None:
    agreed = verdicts_of(DENSE, HOPPER)["fa3"].agreement

    assert agreed is not None
    assert (agreed.cudagraph, agreed.block_size) == ("never", None)


@pytest.mark.parametrize("device", [AMPERE, HOPPER, BLACKWELL, GEFORCE], ids=str)
def test_emulated_pages_rank_last(device: Device) -> None:
    """After other backends, too: the number of emulated features comes before any order of backends."""
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


def test_on_hopper_flashinfer_ranks_after_flash_attention_3_only() -> None:
    """The other variants rank after it, since their kernels were slower; packing ranks last."""
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
        "fa3_tokenspeed",
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
                "fa3": ["alibi undeclared"],
                "fa3_vllm": ["alibi undeclared"],
                "fa4": ["alibi undeclared"],
                "torch": ["alibi undeclared"],
            },
            id="ALiBi",
        ),
        pytest.param(
            LLAMA.evolve(sinks=True),
            HOPPER,
            "fa3_vllm",
            {name: ["sinks undeclared"] for name in ("fa2", "fa2_vllm", "fa3", "torch")},
            id="sinks on Hopper",
        ),
        pytest.param(
            LLAMA.evolve(sinks=True),
            BLACKWELL,
            "fa4",
            {
                "fa2": ["sinks undeclared"],
                "fa3_vllm": ["compute_capability supported: 9.0"],
            },
            id="sinks on Blackwell",
        ),
        pytest.param(
            PAGES_16,
            HOPPER,
            "fa3_vllm",
            {"fa2": ["block_size supported: 256, multiples of 256"]},
            id="pages of 16",
        ),
        pytest.param(LLAMA, HOPPER, "fa3_vllm", {}, id="Hopper"),
        pytest.param(
            LLAMA,
            BLACKWELL,
            "fa4",
            {name: ["compute_capability supported: 9.0"] for name in ("fa3", "fa3_vllm")},
            id="Blackwell",
        ),
        pytest.param(
            LLAMA.evolve(sinks=True),
            AMPERE,
            None,
            {
                "fa2": ["sinks undeclared"],
                "fa2_vllm": ["sinks undeclared"],
                "fa3": [
                    "sinks undeclared",
                    "compute_capability supported: 9.0",
                ],
                "fa3_vllm": ["compute_capability supported: 9.0"],
                "fa4": ["compute_capability supported: 9.0, 10.0f, 11.0"],
                "torch": ["sinks undeclared"],
            },
            id="sinks on Ampere",
        ),
    ],
)
def test_every_variant_is_chosen_or_has_reasons(
    requirements: Requirements, device: Device, chosen: str | None, others: dict[str, list[str]]
) -> None:
    verdicts = verdicts_of(requirements, device)

    assert [name for name, v in verdicts.items() if v.status == "chosen"] == ([chosen] if chosen else [])
    reasons = {name: list(map(in_short, v.reasons)) for name, v in verdicts.items() if v.status == "refused"}
    assert {name: reasons[name] for name in others} == others
    assert all(reasons.values())
    assert chosen not in reasons


@pytest.mark.parametrize(
    ("device", "order"), [(HOPPER, ["fa3", "fa4", "fa2"]), (BLACKWELL, ["fa4", "fa2"]), (AMPERE, ["fa2"])], ids=str
)
def test_newer_kernels_rank_first(device: Device, order: list[str]) -> None:
    verdicts = verdicts_of(LLAMA.evolve(block_size=256), device)
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
    assert {requirement_name(text) for text in required - extras} == {
        "flash-attn-3",
        "torch",
    }  # on no index; installed


def fixes() -> dict[str, Fix]:
    """Return the fix of each variant on a supported device where no library is installed."""
    manifest = read_manifest(MANIFEST)
    found = {each.name: make_candidate(manifest, each, lambda _: None) for each in manifest.variants}
    request = Request(LLAMA.evolve(block_size=256), HOPPER)
    return {name: find_fix(candidate, request) for name, candidate in found.items()}


def test_fixes_install_the_libraries() -> None:
    found = fixes()
    by_name = {name: fix.install for name, fix in found.items() if not fix.action}
    words = {name: fix.action for name, fix in found.items() if fix.action}

    assert by_name == {
        "fa2_vllm": ("vllm >=0.19",),
        "fa3_vllm": ("vllm >=0.19",),
        "fa3_tokenspeed": ("tokenspeed-fa3 >=3.0.0.post20260810,<4",),
        "fa4": ("flash-attn-4 >=4.0.0b11,<4.1",),  # all releases are betas: the bound lets pip install one
        "torch": ("torch >=2.11",),
    }
    assert [(name, found[name].install) for name in words] == [("fa2", ()), ("fa3", ())]


def test_fa2_is_compiled_with_the_installed_torch() -> None:
    action = fixes()["fa2"].action
    (required,) = next(each.requires for each in read_manifest(MANIFEST).variants if each.name == "fa2")

    assert action == f"pip install --no-build-isolation '{required}'"


def test_fa3_is_installed_from_its_repository() -> None:
    action = fixes()["fa3"].action

    assert action.startswith("install flash-attn-3 >=3.0.0b1,<4: pip install --no-build-isolation 'git+https://")
    assert "/Dao-AILab/flash-attention#subdirectory=hopper'" in action
    assert "pip install flash-attn-3" not in action
    assert "pip install 'flash-attn-3" not in action


def test_the_project_passes_check() -> None:
    report = examine(str(PROJECT))

    assert report.backends == ("flash_attn",)
    assert report.findings == ()
