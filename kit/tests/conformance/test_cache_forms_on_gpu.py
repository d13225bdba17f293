"""Every form, layout and order of a batch on a GPU, for each installed variant, compared with the float64 oracle."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug_kit.oracle import Case, check, materialize

pytestmark = pytest.mark.gpu

FORMS = ("joint", "interleaved", "split", "packed", "independent")
LAYOUTS = ("NHD", "HND")
VARIANTS = (
    "torch/sdpa",
    "flash_attn/fa3_vllm",
    "flash_attn/fa4",
    "flash_attn/torch",
    "flashinfer/fa2",
    "flashinfer/fa3",
    "blocksparse/triton",
    "int8_ixformer/triton",
)
PATTERN = {"max_seqlen": 8192, "block_size": 64, "local_blocks": 2, "vert_stride": 2}
FIELDS = {"int8_ixformer/triton": {"kv_cache_dtype": "int8"}, "blocksparse/triton": {"block_sparse": PATTERN}}
BATCHES = {
    "decodes": ((1,) * 5, (40, 0, 300, 77, 16)),
    "prefills": ((33, 200, 16), (0, 0, 0)),
    "chunks": ((17, 64, 5), (96, 31, 250)),
    "mixed, decodes first": ((1, 1, 40, 16), (90, 260, 0, 33)),
    "mixed, decodes last": ((40, 16, 1, 1), (0, 33, 260, 90)),
    "mixed, any order": ((16, 1, 40, 1, 70, 1), (33, 260, 0, 90, 5, 0)),
}


def loaded(variant: str, case: Case, **engine: object) -> attnplug.contract.Backend | None:
    requested = case.requirements(**engine)
    selection = attnplug.explain(requested, backend=variant).chosen
    return None if selection is None else selection.load()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("form", "layout"), list(product(FORMS, LAYOUTS)))
def test_a_form_is_read_and_written(variant: str, form: str, layout: str) -> None:
    served = 0
    for seed, (name, (queries, contexts)) in enumerate(BATCHES.items()):
        for size in (16, 32, 64):
            case = Case(
                query_lens=queries,
                context_lens=contexts,
                num_q_heads=8,
                num_kv_heads=2,
                head_size=128,
                dtype="bfloat16",
                block_size=size,
                num_padding_tokens=3,
                seed=seed,
                **FIELDS.get(variant, {}),  # type: ignore[arg-type]
            )
            try:
                backend = loaded(variant, case, block_size=size, kv_layout=layout, kv_cache_form=form)
            except attnplug.errors.AttnplugError as error:
                pytest.skip(f"{variant}: {error}")
            if backend is None:
                continue
            for host_writes in {False, "host" in _writers(backend)}:
                try:
                    check(backend, materialize(case), host_writes=host_writes)
                except AssertionError as error:
                    raise AssertionError(f"{name}, blocks of {size}, host_writes={host_writes}: {error}") from error
            served += 1
    if not served:
        pytest.skip(f"{variant} does not take {form} KV caches of the layout {layout}")


def _writers(backend: attnplug.contract.Backend) -> set[str]:
    declared = attnplug.contract.by_phase(backend.impl_class.cache_write).values()
    return {"host"} if set(declared) <= {"host", "either"} else set()


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_forms_and_orders(variant: str) -> None:
    generator, served = random.Random(18), 0
    for seed in range(40):
        lens = [(generator.choice((1, 1, 1, 7, 33, 130)), generator.choice((0, 5, 64, 333))) for _ in range(6)]
        case = Case(
            query_lens=tuple(query for query, _ in lens),
            context_lens=tuple(context for _, context in lens),
            num_q_heads=generator.choice((2, 8, 16)),
            num_kv_heads=2,
            head_size=128,
            dtype="bfloat16",
            block_size=generator.choice((16, 32, 64)),
            seed=seed,
            **FIELDS.get(variant, {}),  # type: ignore[arg-type]
        )
        engine = {"kv_layout": generator.choice(LAYOUTS), "kv_cache_form": generator.choice(FORMS)}
        try:
            backend = loaded(variant, case, block_size=case.block_size, **engine)
        except attnplug.errors.AttnplugError as error:
            pytest.skip(f"{variant}: {error}")
        if backend is not None:
            check(backend, materialize(evolve(case, gain=generator.choice((1.0, 4.0)))))
            served += 1
    if not served:
        pytest.skip(f"nothing here serves {variant}")
    assert torch.cuda.is_available()
