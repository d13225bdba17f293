"""The default number of blocks of an engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attnplug.contract import AttentionImpl, Limits, LoadedBackend
from attnplug.errors import LimitsError
from attnplug_transformers.engine import Engine
from attnplug_transformers.engine.layers import CPU_BYTES, count_blocks, free_bytes, make_caches
from hosts.transformers.tests.engine.reference import reference
from hosts.transformers.tests.models import model

CPU = torch.device("cpu")
LIMITS = Limits(max_num_reqs=4, max_num_tokens=64, max_seq_len=100)


def groups(bytes_per_block, workspace=0, block_size=16):
    return SimpleNamespace(
        bytes_per_block=bytes_per_block, workspace_bytes=lambda limits: workspace, block_size=block_size
    )


def test_no_more_blocks_than_all_requests_can_fill():
    assert count_blocks(groups(10), LIMITS, CPU, None) == 4 * 7 + 1
    assert count_blocks(groups(10, block_size=100), LIMITS, CPU, 10**6) == 4 + 1


def test_blocks_that_fit_beside_the_workspaces():
    assert count_blocks(groups(2**28), LIMITS, CPU, None) == CPU_BYTES // 2**28
    assert count_blocks(groups(10, workspace=90), LIMITS, CPU, 190) == 10


def test_too_little_memory():
    with pytest.raises(LimitsError, match="two blocks, the least"):
        count_blocks(groups(10, workspace=90), LIMITS, CPU, 100)
    with pytest.raises(LimitsError, match="0 MiB of cpu are left"):
        count_blocks(groups(10), LIMITS, CPU, -5)


def test_caches_that_do_not_fit(host, monkeypatch):
    engine = Engine(reference("llama")[0])

    def full(*given, **keywords):
        raise torch.OutOfMemoryError("no more")

    monkeypatch.setattr(LoadedBackend, "make_cache", full)
    with pytest.raises(LimitsError, match="smaller num_blocks"):
        make_caches(engine._groups, 5, CPU)
    engine.close()


def test_each_layer_initializes_its_kv_cache(host, monkeypatch):
    """Scales of a quantized KV cache, for one: uninitialized they make attention NaN."""
    written = {}
    keep = lambda impl, kv_cache: written.setdefault(impl.layer.name, kv_cache)  # noqa: E731 - one line
    monkeypatch.setattr(AttentionImpl, "init_cache", keep)
    engine = Engine(reference("llama")[0])
    first = set(written)  # when it was opened
    written.clear()
    caches, _ = make_caches(engine._groups, 5, CPU)
    engine.close()

    assert len(caches) > 1
    assert first == caches.keys()
    assert all(written[name] is cache for name, cache in caches.items())


def test_the_default_of_an_engine(host):
    engine = Engine(reference("llama")[0], max_num_reqs=3, max_seq_len=40)

    assert engine.limits.num_blocks == 3 * 3 + 1  # blocks of 16
    engine.close()


@pytest.mark.parametrize(
    ("rank", "rope", "dtype", "published"),
    [(512, 64, "auto", 1152), (256, 64, "auto", 640), (256, 32, "auto", 576), (512, 64, "fp8_ds_mla", 656)],
)
def test_latents_take_the_published_bytes(host, rank, rope, dtype, published):
    sizes = {"kv_lora_rank": rank, "qk_rope_head_dim": rope, "head_dim": rope, "num_hidden_layers": 2}
    made = model("deepseek_v3", dtype=torch.bfloat16, **sizes)

    with Engine(made, max_seq_len=40, num_blocks=7, kv_cache_dtype=dtype) as engine:
        memory = [one for cache in engine._runner._caches.values() for one in cache.storages]
        assert engine._groups.bytes_per_block == 2 * engine.block_size * published
        assert [one.nbytes for one in memory] == [7 * engine.block_size * published] * 2
        assert len(engine.generate([[1, 2, 3]], max_new_tokens=3)[0]) == 3


@pytest.mark.parametrize("fraction", [0, -0.1, 1.01, "0.5", True])
def test_fractions_out_of_range(fraction):
    with pytest.raises(LimitsError, match="memory_fraction"):
        free_bytes(CPU, fraction, lambda: None)


def test_a_device_that_does_not_report_its_memory():
    assert free_bytes(CPU, 0.9, lambda: pytest.fail("nothing is measured")) is None


def test_free_memory_on_cuda(monkeypatch):
    """The largest step takes 30 on top of what is in use; 400 of 1000 are, and 900 may be."""
    peak = {"now": 100}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update(now=100))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak["now"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (600, 1000))

    found = free_bytes(torch.device("cuda"), 0.9, lambda: peak.update(now=130))

    assert found == 900 - 400 - 30
