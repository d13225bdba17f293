"""
Multi-head latent attention (MLA): steps of vLLM's runner made by hand, through vLLM's own loop over a cached prefix.

Outputs are compared with attention to keys and values per head in float64. Weights and sizes are small.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace as Names
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state
from vllm.model_executor.layers.attention import mla_attention
from vllm.utils import torch_utils
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
from vllm.v1.attention.backends.mla.prefill.selector import get_mla_prefill_backend
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

import attnplug
from attnplug.errors import ContractError, NotNegotiatedError
from attnplug_kit.oracle import attend
from attnplug_vllm import facts, latent, prefill, registration, selector
from hosts.vllm.tests.cuda_platform import use_cuda
from hosts.vllm.tests.rig import CHOICE, CPU, ORDERS, config_of
from tests.backends.rank_groups import ThreadGroup
from tests.torch_pair import RUNS, offer_pair

RANK, ROPE, NOPE, VALUE = 32, 8, 24, 16
HEADS, BLOCK, BLOCKS, ROWS = 4, 4, 129, 32
SIZE = NOPE + ROPE
SCALE = 0.3
HAS_CHUNKS = hasattr(mla_attention.MLACommonPrefillMetadata, "ContextChunk")  # from 0.32 on


class Projection:
    """The layer that expands latents, of some heads."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, latents: torch.Tensor) -> tuple[torch.Tensor, None]:
        return latents @ self.weight.flatten(0, 1).T, None


class Own(prefill.MLAPrefillBackend):
    """A prefill backend of vLLM, which nothing may run."""

    @staticmethod
    def get_name() -> str:
        return "OWN"

    def run_prefill_new_tokens(self, **given: Any) -> Any:
        raise AssertionError

    run_prefill_context_chunk = run_prefill_new_tokens


class Rank:
    """One layer on one rank: its heads, its part of the KV cache, and its builder."""

    def __init__(self, rank: int = 0, ranks: int = 1, interleave: int = 1, **options: Any) -> None:
        self.rank, self.ranks, self.interleave = rank, ranks, interleave
        torch.manual_seed(0)
        whole = torch.randn(HEADS * ranks, NOPE + VALUE, RANK) * RANK**-0.5
        self.weights = whole[rank * HEADS : (rank + 1) * HEADS]
        layers: dict[str, Any] = {}
        config = config_of(layers, dcp_size=ranks, dcp_interleave=interleave, order=ORDERS[0], **options)
        sizes = {"kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": VALUE}
        config.model_config.__dict__.update(
            use_mla=True,
            dtype=torch.float32,
            hf_text_config=Names(q_lora_rank=None, **sizes),
            get_head_size=lambda: RANK + ROPE,
            get_num_attention_heads=lambda _: HEADS,
        )
        config.cache_config.block_size = BLOCK
        config.parallel_config.prefill_context_parallel_size = 1
        config.attention_config.__dict__.update(
            {"mla_prefill_backend": None, "use_prefill_query_quantization": False} | options.get("attention", {})
        )
        self.config, self.spec = config, MLAAttentionSpec()
        with current(config), default_dtype(torch.float32):
            impl = latent.latent_classes(CHOICE)[0](
                *(HEADS, RANK + ROPE, SCALE, 1, None, None, "auto", None, "decoder", None),
                q_lora_rank=None,
                qk_head_dim=SIZE,
                kv_b_proj=Projection(self.weights),
                **sizes,
            )
            own = Own(HEADS, SCALE, *sizes.values(), config)
            self.layer = layers["layers.0"] = Names(
                impl=impl,
                prefill_backend=own,
                dcp_manager=Manager(),
                kv_cache=torch.full((BLOCKS, BLOCK, RANK + ROPE), torch.nan),
                q_lora_rank=None,
                num_heads=HEADS,
                **sizes,
                **{f"_{letter}_scale": torch.tensor(1.0) for letter in "qkv"},
            )
            impl.dcp_world_size, impl.dcp_rank = ranks, rank
            self.builder = latent.latent_classes(CHOICE)[1](self.spec, ["layers.0"], config, CPU)
        self.table = torch.arange(1, BLOCKS).view(4, 32).flip(1).int().contiguous()

    def common(self, new: list[int], lens: list[int]) -> Any:
        """Return the metadata of a step: new tokens and lengths of its requests."""
        slots = []
        for request, (count, length) in enumerate(zip(new, lens, strict=True)):
            for position in range(length - count, length):
                turn, offset = divmod(position, self.interleave)
                place = turn // self.ranks * self.interleave + offset
                block = int(self.table[request, place // BLOCK])
                slots.append(block * BLOCK + place % BLOCK if turn % self.ranks == self.rank else -1)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        local = get_dcp_local_seq_lens(seq_lens, self.ranks, self.rank, self.interleave)
        starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(new),
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(lens),
            block_table_tensor=self.table[: len(new)].clone(),
            slot_mapping=torch.tensor(slots),
            dcp_local_seq_lens=local if self.ranks > 1 else None,
        )

    def run(self, new: list[int], lens: list[int], rows: Any, group: Any = None) -> torch.Tensor:
        """Run a step as vLLM's layer does, and return its output; queries are those of this rank's heads."""
        query, latents = rows[0][:, self.rank * HEADS : (self.rank + 1) * HEADS].contiguous(), rows[1]
        layer, impl = self.layer, self.layer.impl
        common = self.common(new, lens)
        with current(self.config):
            metadata = self.builder.build(0, common)
        kv_c, k_pe = latents.split([RANK, ROPE], dim=-1)
        impl.do_kv_cache_update(kv_c, k_pe.unsqueeze(1), layer.kv_cache, common.slot_mapping, "auto", layer._k_scale)
        output, decodes = torch.zeros(sum(new), HEADS * VALUE), metadata.num_decode_tokens
        if metadata.num_prefills:
            arguments = query[decodes:], kv_c[decodes:], k_pe[decodes:].unsqueeze(1), layer.kv_cache, metadata
            impl.forward_mha(*arguments, layer._k_scale, output=output[decodes:])
        if decodes:
            output[:decodes] = self.decode(query[:decodes], metadata, group)
        return output

    def decode(self, query: torch.Tensor, metadata: Any, group: Any) -> torch.Tensor:
        """Absorb, gather the heads of all ranks, attend, and merge what the ranks attended to."""
        nope, rope = query.split([NOPE, ROPE], dim=-1)
        absorbed = torch.cat([torch.einsum("tnp,npl->tnl", nope, self.weights[:, :NOPE]), rope], dim=-1)
        if self.ranks > 1:
            absorbed = torch.cat(group.exchange(self.rank, absorbed), dim=1)
        out, lse = self.layer.impl.forward_mqa(absorbed, self.layer.kv_cache, metadata, self.layer)
        assert (lse is None) is (self.ranks == 1)
        if self.ranks > 1:
            assert lse.shape == out.shape[:2]
            lses, outs = (torch.stack(group.exchange(self.rank, each)) for each in (lse, out))
            assert not outs.isnan().any()
            out = (outs * (lses - lses.logsumexp(0)).exp()[..., None]).sum(0)
            out = out[:, self.rank * HEADS : (self.rank + 1) * HEADS]
        return torch.einsum("tnl,nvl->tnv", out, self.weights[:, NOPE:]).flatten(1)

    def expected(self, query: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Return attention of the last tokens of one request to all of it."""
        kv_c, k_pe = latents.double().split([RANK, ROPE], dim=-1)
        expanded = torch.einsum("tl,nel->tne", kv_c, self.weights.double())
        keys = torch.cat([expanded[..., :NOPE], k_pe[:, None].expand(-1, HEADS, -1)], dim=-1)
        heads = query[:, self.rank * HEADS : (self.rank + 1) * HEADS]
        return attend(heads, keys, expanded[..., NOPE:], scale=SCALE).output


class MLAAttentionSpec(Names):
    """VLLM's description of the pool of a layer."""

    block_size, head_size, dtype, num_kv_heads = BLOCK, RANK + ROPE, torch.float32, 1


class Manager:
    """What exchanges between ranks in vLLM from 0.33 on: its prefills gather latents."""

    def init_kv_gather(self, workspace: torch.Tensor, size: int) -> None:
        """Do without buffers."""

    def kv_gather(self, out: torch.Tensor, own: torch.Tensor) -> None:
        out.copy_(parallel_state.get_dcp_group().all_gather(own, dim=0))


@contextmanager
def current(config: Any) -> Any:
    """Make a configuration current, in this thread alone."""
    before = getattr(_thread, "config", None)
    _thread.config = config
    try:
        yield
    finally:
        _thread.config = before


_thread = threading.local()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def gather(src_cache: Any, dst: Any, block_table: Any, cu_seq_lens: Any, seq_starts: Any, **_: Any) -> None:
    """Gather latents of a chunk: vLLM's operators of a GPU."""
    for request, (start, end) in enumerate(zip(cu_seq_lens[:-1].tolist(), cu_seq_lens[1:].tolist(), strict=True)):
        positions = torch.arange(end - start) + int(seq_starts[request])
        blocks = block_table[request, (positions // BLOCK).clamp(max=block_table.shape[1] - 1)].long()
        dst[start:end] = src_cache[blocks, positions % BLOCK]


def merge(output: Any, prefix_output: Any, prefix_lse: Any, suffix_output: Any, suffix_lse: Any, **rest: Any) -> None:
    """Merge as vLLM's kernel of a GPU, which reads LSEs of base e; before 0.32 as contiguous ``(heads, tokens)``."""
    tokens, heads, _ = output.shape
    lses = []
    for each in (prefix_lse, suffix_lse):
        assert each.shape == (heads, tokens)
        lses.append(each if HAS_CHUNKS else each.as_strided((heads, tokens), (tokens, 1)))
    total = torch.logaddexp(*lses)
    first, second = ((lse - total).exp().nan_to_num().T[..., None] for lse in lses)
    merged = prefix_output * first + suffix_output * second
    some = rest.get("prefill_tokens_with_context") or tokens
    output[:some], output[some:] = merged[:some], suffix_output[some:]
    if rest.get("output_lse") is not None:
        rest["output_lse"].copy_(total)


@pytest.fixture(autouse=True)
def vllm_on_a_cpu(monkeypatch):
    """Replace what vLLM has for GPUs alone, and let its workspace hold a few rows: prefixes come in several chunks."""
    monkeypatch.setattr(facts, "platform_name", lambda: "cpu")
    monkeypatch.setattr(latent, "_ON_CPU", True)
    monkeypatch.setattr(latent.LatentBuilder, "reorder_batch_threshold", 1)
    monkeypatch.setattr(facts, "current_config", lambda: getattr(_thread, "config", None))
    monkeypatch.setattr(mla_attention, "get_current_vllm_config", lambda: _thread.config)
    rows = staticmethod(lambda config: ROWS)
    monkeypatch.setattr(mla_attention.MLACommonMetadataBuilder, "determine_chunked_prefill_workspace_size", rows)
    for name in ("gather_and_maybe_dequant_cache", "cp_gather_cache"):
        monkeypatch.setattr(mla_attention.ops, name, gather)
    monkeypatch.setattr(mla_attention, "merge_attn_states", merge)
    if not HAS_CHUNKS:
        monkeypatch.setattr(mla_attention, "mask_empty_context", lambda *_: None)  # such rows are 0 and -inf
        unpinned = {name: _unpinned(getattr(torch, name)) for name in ("empty", "zeros")}
        monkeypatch.setattr(mla_attention, "torch", Names(**vars(torch) | unpinned))
    for module in (mla_attention, torch_utils):
        monkeypatch.setattr(module, "PIN_MEMORY", False, raising=False)
    registration._claim_prefills()
    yield
    MLAPrefillBackendEnum.CUSTOM.clear_override()


def _unpinned(make):
    def without(*sizes, pin_memory=False, **rest):
        del pin_memory
        return make(*sizes, **rest)

    return without


STEPS = ([1, 20], [1, 7], [1, 1], [13, 1], [33, 40, 1], [2, 3, 17], [1, 1, 1])


def compare(run, ranks, worst=1e-5):
    """Run steps on ranks, and compare the output of each request. Tokens behind the first long query are prefills."""
    generator = torch.Generator().manual_seed(1)
    cached = [torch.empty(0, RANK + ROPE)] * 4
    for new in STEPS:
        lens = [len(rows) + count for rows, count in zip(cached, new, strict=False)]
        heads = HEADS * len(ranks)
        rows = (
            torch.randn(sum(new), heads, SIZE, generator=generator),
            torch.randn(sum(new), RANK + ROPE, generator=generator),
        )
        outputs, place = run(new, lens, rows), 0
        for request, count in enumerate(new):
            own = slice(place, place + count)
            cached[request] = torch.cat([cached[request], rows[1][own]])
            for rank, output in zip(ranks, outputs, strict=True):
                expected = rank.expected(rows[0][own], cached[request]).flatten(1)
                error = float((output[own].double() - expected).abs().max())
                assert error < worst, (new, request, rank.rank, error)
            place += count


@pytest.mark.feature("MLA", "chunked prefill", "prefix caching")
@pytest.mark.parametrize("absorbed", [1, 8])
def test_prefills_run_on_what_attnplug_chose(monkeypatch, absorbed):
    """Queries are absorbed up to this length; `Own` fails where it is run."""
    monkeypatch.setattr(latent.LatentBuilder, "reorder_batch_threshold", absorbed)
    rank = Rank()
    compare(lambda new, lens, rows: [rank.run(new, lens, rows)], [rank])


@pytest.mark.parametrize("absorbed", [1, 8])
def test_absorbed_queries_are_routed_by_their_batch(monkeypatch, tmp_path, absorbed):
    """A routed pair: vLLM expands long prefills by itself, so that the decodes beside them are a batch of decodes."""
    monkeypatch.setattr(latent.LatentBuilder, "reorder_batch_threshold", absorbed)
    monkeypatch.setitem(globals(), "CHOICE", (offer_pair(tmp_path, monkeypatch),))
    rank = Rank()
    compare(lambda new, lens, rows: [rank.run(new, lens, rows)], [rank])

    assert all(name == ("first" if set(lens) == {1} else "second") for name, lens in RUNS)
    batches = {tuple(lens) for _, lens in RUNS}
    assert batches >= {(1,), (1, 1), (1, 1, 1)}
    assert ((1, 7) in batches) is (absorbed == 8)


@pytest.fixture
def group(monkeypatch):
    """Two ranks that are threads of this process, which share contexts."""
    made = ThreadGroup(2)

    def all_gather(tensor, dim):
        return torch.cat(made.exchange(_thread.rank, tensor.clone()), dim)

    def get_group():
        return Names(world_size=2, rank_in_group=_thread.rank, all_gather=all_gather)

    for module in (parallel_state, mla_attention):
        monkeypatch.setattr(module, "get_dcp_group", get_group)
    monkeypatch.setattr(mla_attention, "MLADCPManager", Manager, raising=False)
    return made


def ranks_of(group, interleave, **options):
    """Return the ranks, and what runs a step on them."""

    def run(rank, _, new, lens, rows):
        _thread.rank = rank
        return ranks[rank].run(new, lens, rows, group)

    ranks = []
    for rank in range(2):
        _thread.rank = rank
        ranks.append(Rank(rank, 2, interleave, **options))
    return ranks, lambda *step: group.call(run, *step)


@pytest.mark.feature("MLA", "DCP")
@pytest.mark.parametrize("interleave", [1, 4])
def test_ranks_share_the_latents_of_a_request(group, interleave):
    """Each has its heads and a part of the KV cache; short requests have no key on the second rank."""
    ranks, run = ranks_of(group, interleave)
    requested = ranks[0].layer.impl.requirements
    assert (requested.num_q_heads, requested.dcp_size, requested.return_lse) == (2 * HEADS, 1, True)
    assert ranks[0].builder.reorder_batch_threshold == 1
    compare(run, ranks)


def of_all(builder, common, found, **_):
    """Keep the lengths of whole sequences."""
    del builder
    found.decode.without_keys = None
    return latent._first_requests(common, found)


def of_one_each(builder, common, found, **_):
    """Count keys as if ranks had every second one."""
    local = get_dcp_local_seq_lens(common.seq_lens, 2, builder._dcp_rank, 1)
    return DECODES(builder, common.replace(dcp_local_seq_lens=local), found, is_captured=True)


def with_rows_in_vain(builder, common, found, **named):
    """Leave the output of rows without keys as it is."""
    first = DECODES(builder, common, found, **named)
    found.decode.without_keys = None
    return first


def in_base_2(impl, *given):
    out, lse = FORWARD(impl, *given)
    return out, lse / torch.log(torch.tensor(2.0))


DECODES, FORWARD = latent.LatentBuilder._decodes, latent.LatentImpl.forward_mqa
WRONG = {
    "global lengths": (latent.LatentBuilder, "_decodes", of_all),
    "interleave ignored": (latent.LatentBuilder, "_decodes", of_one_each),
    "rows without keys": (latent.LatentBuilder, "_decodes", with_rows_in_vain),
    "LSE of base 2": (latent.LatentImpl, "forward_mqa", in_base_2),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_adapters_of_ranks_are_found(monkeypatch, group, wrong):
    monkeypatch.setattr(*WRONG[wrong])
    ranks, run = ranks_of(group, 4)
    with pytest.raises((AssertionError, ContractError)):
        compare(run, ranks)


def with_other_lse(change):
    """Return a wrong `LatentPrefill._attend`."""

    def attend(self, *given):
        output, lse = ATTEND(self, *given)
        return output, change(lse)

    return attend


ATTEND = prefill.LatentPrefill._attend
WRONG_LSES = {
    "of base 2": lambda lse: lse / torch.log(torch.tensor(2.0)),
    "as (tokens, heads)": lambda lse: lse.T.contiguous().T if not HAS_CHUNKS else lse.T,
}


@pytest.mark.parametrize("wrong", WRONG_LSES)
def test_wrong_adapters_of_prefills_are_found(monkeypatch, wrong):
    monkeypatch.setattr(prefill.LatentPrefill, "_attend", with_other_lse(WRONG_LSES[wrong]))
    rank = Rank()
    with pytest.raises((AssertionError, RuntimeError)):
        compare(lambda *step: [rank.run(*step)], [rank])


@pytest.mark.feature("MLA", "DCP", "CUDA graphs, FULL_DECODE_ONLY")
def test_a_replayed_graph_reads_the_lengths_of_its_rank(group):
    """What a graph reads is at one place, and each step writes it."""
    ranks, _ = ranks_of(group, 4, mode=CUDAGraphMode.FULL_DECODE_ONLY)
    own = ranks[1]
    held = own.common([1, 1], [1, 1])

    def in_place(lens, *, dummy=False):
        for name, tensor in vars(own.common([1, 1], lens)).items():
            if isinstance(tensor, torch.Tensor):
                getattr(held, name).copy_(tensor)
        held.block_table_tensor.mul_(not dummy)
        held.slot_mapping.masked_fill_(torch.tensor(dummy), -1)
        held.max_seq_len = max(lens)
        return held

    _thread.rank = 1
    with current(own.config):
        captured = own.builder.build_for_cudagraph_capture(in_place([1, 1], dummy=True)).decode
        steps = [own.builder.build(0, in_place(lens)) for lens in ([7, 3], [2, 21])]
    parts = [part for step in steps for part in step.decode.step.parts.values()]
    assert all(part.graph is not None for part in parts)
    (metadata,) = captured.step.parts.values()
    assert metadata.batch.seq_lens.tolist() == [1, 9]  # in place of no key, one
    assert captured.without_keys.tolist() == [True, False]
    assert captured.without_keys.data_ptr() == own.builder._without_keys.data_ptr()


def test_lengths_on_the_cpu_are_those_of_the_rank(group):
    """With tensors on a GPU a builder plans from copies."""
    ranks, _ = ranks_of(group, 4)
    own = ranks[1]
    _thread.rank = 1
    common = own.common([1, 1, 1], [3, 7, 21])
    found = own.builder.build(0, common)
    local = own.builder._decodes(common, found, is_captured=False)
    assert local.seq_lens_cpu_upper_bound.tolist() == local.seq_lens.tolist() == [1, 3, 9]
    assert found.decode.without_keys.tolist() == [True, False, False]
    longer = own.common([1, 1, 1], [5, 7, 21])
    assert own.builder.build(0, longer).decode.without_keys is None
    padded = own.common([1, 1], [5, 0])
    assert own.builder._decodes(padded, own.builder.build(0, common), is_captured=True).seq_lens.tolist() == [1, 0]


@pytest.mark.feature("MLA", kind="selection")
def test_vllm_gets_the_class_for_heads_that_its_own_backends_lack(monkeypatch):
    """It holds for a layer of attnplug: a drafter on vLLM's own attention backend gets a copy of the configuration."""
    config = Rank().config
    attention = config.attention_config
    use_cuda(monkeypatch, (9, 0))
    monkeypatch.setattr(facts, "platform_name", lambda: "cuda")
    monkeypatch.setattr(facts, "choose", lambda requirements, choice: Names(id="acme/plain"))
    monkeypatch.setattr(selector, "chosen_by_config", lambda: CHOICE)
    rest = {"scale": SCALE, **vars(config.model_config.hf_text_config)}
    del rest["q_lora_rank"]
    with current(config):
        layer = Names(num_heads=HEADS, qk_head_dim=SIZE, v_head_dim=VALUE, choice=CHOICE, prefills=False)
        prefill.offer(layer, torch.float32)
        assert (layer.prefills, attention.mla_prefill_backend) == (True, MLAPrefillBackendEnum.CUSTOM)
        made = get_mla_prefill_backend(config)(num_heads=HEADS, vllm_config=config, **rest)
    assert isinstance(made, prefill.LatentPrefill)
    assert attention.mla_prefill_backend is None
    attention.mla_prefill_backend = MLAPrefillBackendEnum.CUSTOM  # by the user
    made.clone()
    assert attention.mla_prefill_backend is MLAPrefillBackendEnum.CUSTOM


@pytest.mark.parametrize(
    ("chosen", "attention", "reason"),
    [
        (None, {}, "attnplug prefills for its own attention backends"),
        (CHOICE, {"use_prefill_query_quantization": True}, "use_prefill_query_quantization=True was given"),
        (("flash_attn/fa3",), {}, "no attention backend of attnplug can serve"),
    ],
)
def test_what_cannot_prefill_is_refused_by_name(monkeypatch, chosen, attention, reason):
    config = Rank().config
    vars(config.attention_config).update(attention)
    monkeypatch.setattr(selector, "chosen_by_config", lambda: chosen)
    sizes = Names(qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE)
    with current(config):
        (found,) = prefill.LatentPrefill.validate_configuration(None, Names(dtype=torch.float32, mla_dimensions=sizes))
    assert reason in found


@pytest.mark.parametrize(
    ("attention", "taken", "reason"),
    [
        ({"mla_prefill_backend": MLAPrefillBackendEnum.FLASH_ATTN}, False, None),
        ({"use_prefill_query_quantization": True}, False, "use_prefill_query_quantization=True was given to vLLM"),
        ({}, True, "vLLM's MLA prefill backend CUSTOM is theirs.Prefill"),
    ],
)
def test_vllm_prefills_on_its_own_and_says_why(monkeypatch, attention, taken, reason):
    said = []
    monkeypatch.setattr(prefill, "_say", said.append)
    if taken:
        register_mla_prefill_backend(MLAPrefillBackendEnum.CUSTOM, "theirs.Prefill")
    rank = Rank(attention=attention)
    assert not rank.layer.impl.prefills
    assert isinstance(rank.builder._prefill_backend, Own)
    assert [reason in text for text in said] == [True] * (reason is not None)


def test_what_is_named_on_a_cpu_runs_or_is_an_error():
    """VLLM's CPU platform reads no name of a prefill backend."""
    named = {"mla_prefill_backend": MLAPrefillBackendEnum.CUSTOM}
    rank = Rank(attention=named)
    assert isinstance(rank.builder._prefill_backend, prefill.LatentPrefill)
    with pytest.raises(NotNegotiatedError, match="use_prefill_query_quantization"):
        Rank(attention=named | {"use_prefill_query_quantization": True})


def test_what_sleep_discards_is_made_again_in_a_step():
    rank = Rank(enable_cumem_allocator=True)
    state = rank.builder._prefill_backend._among_new.builder.state
    compare(lambda *step: [rank.run(*step)], [rank])
    backend = rank.builder._prefill_backend
    assert backend._among_new.builder.state is not state
    assert backend.made_in_pool is None


def test_a_builder_does_not_select_prefills_again(monkeypatch):
    """On Blackwell vLLM would do so for an FP8 KV cache, without the name that was offered."""

    def select():
        raise AssertionError

    rank = Rank()
    monkeypatch.setattr(mla_attention, "backend_supports_prefill_query_quantization", select)
    rank.config.cache_config.cache_dtype = "fp8"
    with current(rank.config):
        rank.layer.prefill_backend = rank.builder._prefill_backend
        builder = latent.latent_classes(CHOICE)[1](rank.spec, ["layers.0"], rank.config, CPU)
    assert builder.q_data_type is torch.float32


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((192, 128), {"flash_attn/fa3_vllm", "flashinfer/fa3"}),  # DeepSeek, Kimi
        ((256, 256), {"flash_attn/fa3_vllm", "flashinfer/fa3"}),  # GLM
        ((128, 128), {"flash_attn/fa3_vllm", "flashinfer/fa3"}),  # Mistral 4
        ((96, 96), {"flash_attn/fa3_vllm"}),
    ],
)
def test_backends_declare_both_kinds_of_calls(sizes, names):
    """One backend serves new tokens and cached ones on Hopper."""
    hopper = attnplug.Device.cuda("9.0")
    for wanted in prefill.requests(16, *sizes, torch.bfloat16):
        verdicts = attnplug.explain(wanted, hopper, assume_installed=True).verdicts
        assert names <= {each.id for each in verdicts if not each.reasons}


def test_batch_invariance_is_requested_without_a_configuration(monkeypatch):
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    assert all(each.batch_invariant for each in prefill.requests(16, 192, 128, torch.bfloat16))
