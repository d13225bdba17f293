from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

import attnplug
from attnplug.contract import GraphShape, Limits, LoadedBackend
from attnplug.request.device import Device
from attnplug.torch_backend import plugin
from attnplug.torch_backend.backend import FlexBackend, TorchBackend
from attnplug_kit.oracle import Case, check, materialize

if TYPE_CHECKING:
    import torch


def requirements(**requested: object) -> attnplug.Requirements:
    return attnplug.Requirements(
        **{"head_size": 64, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "float32", **requested}
    )


def test_reading_the_plugin_imports_no_torch() -> None:
    code = "import sys, attnplug.torch_backend.plugin; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("requested", "first"),
    [
        ({}, "sdpa"),
        ({"causal": False}, "sdpa"),
        ({"sinks": True}, "flex"),
        ({"return_lse": True}, "flex"),
        ({"sliding_window": 256}, "sdpa"),
        ({"logits_soft_cap": 50.0}, "flex"),
        ({"alibi": "linear"}, "flex"),
        ({"attn_type": "encoder_only"}, "sdpa"),
    ],
    ids=str,
)
def test_a_gpu_gets_the_faster_variant(requested: dict[str, object], first: str) -> None:
    on_gpu = attnplug.explain(requirements(**requested), Device.cuda("9.0"), assume_installed=True)
    ranks = [verdict.id for verdict in on_gpu.verdicts if verdict.id.startswith("torch/")]

    assert ranks[0] == f"torch/{first}"
    assert len(ranks) == 2
    assert attnplug.select(requirements(**requested), Device.cpu(), backend="torch").id == "torch/sdpa"


@pytest.mark.parametrize(
    "requested",
    [{"block_sparse": {"size": 64}}, {"kv_cache_dtype": "int8"}, {"output_quant": "fp8"}, {"dcp_size": 2}],
    ids=str,
)
def test_unsupported_requirements_are_refused(requested: dict[str, object]) -> None:
    with pytest.raises(attnplug.NoBackendError):
        attnplug.select(requirements(**requested), Device.cpu(), backend="torch/sdpa")


def test_flex_does_not_support_batch_masks() -> None:
    found = attnplug.explain(requirements(custom_mask=True), Device.cuda("9.0"), assume_installed=True)
    verdicts = {verdict.id: verdict for verdict in found.verdicts}

    assert not verdicts["torch/sdpa"].reasons
    assert [reason.field for reason in verdicts["torch/flex"].reasons] == ["custom_mask"]


def test_the_probe_requires_a_c_compiler_for_flex_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin.shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    assert plugin.attnplug_probe("flex", Device.cpu()) is None
    monkeypatch.setattr(plugin.shutil, "which", lambda _: None)
    assert plugin.attnplug_probe("sdpa", Device.cpu()) is None
    assert "C compiler" in str(plugin.attnplug_probe("flex", Device.cpu()))


def test_the_workspace_holds_the_longest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = attnplug.load(requirements(), Device.cpu(), backend="torch/sdpa")
    per_key = 2 * 2 * 64 * 4
    limits = Limits(max_num_reqs=4, max_num_tokens=512, max_seq_len=1000)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)

    assert backend.workspace_bytes(limits) == 4 * 1008 * per_key, "in whole blocks of 16"
    assert backend.workspace_bytes(evolve(limits, max_num_reqs=1000)) == 2 * 2**23
    assert backend.workspace_bytes(evolve(limits, max_seq_len=10**6)) == 10**6 * per_key


def test_dense_calls_need_no_workspace() -> None:
    backend = attnplug.load(requirements(paged=False), Device.cpu(), backend="torch/sdpa")

    assert backend.workspace_bytes(Limits(max_num_reqs=4, max_num_tokens=512, max_seq_len=1000)) == 0


@pytest.mark.parametrize(
    "shape", [GraphShape(1, 40), GraphShape(3, 3, 1), GraphShape(3, 50), GraphShape(2, 8, 4)], ids=str
)
@pytest.mark.parametrize(
    "requested",
    [
        {"sinks": True},
        {"paged": False, "alibi": "sqrt"},
        {"attention_chunk": 16, "alibi": "linear", "kv_sharing": True},
        {"attn_type": "encoder_decoder"},
        {"attn_type": "encoder_only", "sliding_window": 8},
        {"kv_cache_dtype": "fp8", "per_head_scales": True},
    ],
    ids=str,
)
def test_warming_up_runs_each_shape(
    shape: GraphShape, requested: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", minversion="2.11", reason="the variant flex needs torch 2.11, as its manifest says")
    from attnplug.torch_backend import flex  # noqa: PLC0415 - an older torch does not have what it imports

    ran: list[tuple[int, ...]] = []

    def attend(query: torch.Tensor, key: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        ran.append((query.shape[0], query.shape[2] // 2))
        return query, query[..., 0].float()

    monkeypatch.setattr(flex, "compiled", lambda *_: attend)
    wanted = requirements(**{"num_q_heads": 4, **requested})
    selection = attnplug.select(wanted, Device.cpu(), backend="torch/sdpa")
    agreement = evolve(selection.agreement, variant="flex")

    LoadedBackend(FlexBackend(agreement, Device.cpu())).warmup([shape])

    assert sum(members * rows for members, rows in ran) >= shape.num_tokens


def test_variants_are_classes_of_one_backend() -> None:
    selection = attnplug.select(requirements(), Device.cpu(), backend="torch/sdpa")

    assert plugin.attnplug_backend("sdpa", selection.agreement) is TorchBackend
    assert plugin.attnplug_backend("flex", selection.agreement) is FlexBackend


@pytest.mark.parametrize(
    ("built", "said", "fix"),
    [
        (None, "is built without CUDA, and sees no cuda device", "install a torch that is built for CUDA"),
        ("13.0", ") sees no cuda device", "check nvidia-smi and CUDA_VISIBLE_DEVICES"),
    ],
)
def test_a_torch_without_a_device_says_so(
    monkeypatch: pytest.MonkeyPatch, built: str | None, said: str, fix: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built)
    monkeypatch.setattr("torch.version.hip", None)

    reason = plugin.attnplug_probe("sdpa", Device.cuda("9.0"))

    assert reason is not None
    assert said in reason.supported
    assert reason.because == f"{fix}, or select for Device.cpu()"
    assert plugin.attnplug_probe("sdpa", Device.cpu()) is None


@pytest.mark.parametrize(
    ("hip", "available", "said", "fix"),
    [
        (None, True, "is built without ROCm, and sees no AMD device", "install a torch that is built for ROCm"),
        ("6.3", False, ") sees no AMD device", "check rocm-smi and HIP_VISIBLE_DEVICES"),
        ("6.3", True, None, ""),
    ],
)
def test_an_amd_device_requires_a_torch_for_rocm(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, available: bool, said: str | None, fix: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: available)
    monkeypatch.setattr("torch.version.cuda", None if hip else "13.0")
    monkeypatch.setattr("torch.version.hip", hip)

    reason = plugin.attnplug_probe("sdpa", Device.parse("mi300x"))

    if said is None:
        assert reason is None
    else:
        assert reason is not None
        assert said in reason.supported
        assert reason.because == f"{fix}, or select for Device.cpu()"


def test_sdpa_is_eligible_on_a_hip_device_unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(
        name="AMD Instinct MI300X",
        major=9,
        minor=4,
        multi_processor_count=304,
        gcnArchName="gfx942:sramecc+:xnack-",
    )
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: facts)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.version.hip", "6.3")
    device = Device.current()

    found = attnplug.explain(requirements(), device, backend="torch", assume_installed=True)
    verdicts = {verdict.id: verdict for verdict in found.verdicts}

    assert (device.vendor, device.arch, device.compute_capability) == ("amd", "gfx942", None)
    assert verdicts["torch/sdpa"].status == "chosen"
    assert "not verified: no run of the conformance kit" in str(found)
    assert [reason.field for reason in verdicts["torch/flex"].reasons] == ["vendor"]


@pytest.mark.parametrize("phases", [("decode",), ("prefill",)])
def test_a_host_may_request_one_phase(phases: tuple[str, ...]) -> None:
    assert attnplug.load(requirements(phases=phases), Device.cpu()).id == "torch/sdpa"


@pytest.mark.parametrize(
    ("phase", "lengths"), [("decode", {"query_lens": (1, 1, 1)}), ("prefill", {"query_lens": (5, 9, 1)})]
)
def test_one_phase_alone_gives_what_both_give(phase: str, lengths: dict[str, tuple[int, ...]]) -> None:
    case = Case(**lengths, context_lens=(20, 3, 40))
    requested = case.requirements(block_size=case.block_size, phases=(phase,))

    check(attnplug.load(requested, Device.cpu(), backend="torch/sdpa"), materialize(case))


@pytest.mark.parametrize(("product", "status"), [("mi300x", "refused"), ("mi355x", "eligible")])
def test_an_fp8_cache_of_gfx942_has_another_encoding(product: str, status: str) -> None:
    request = requirements(kv_cache_dtype="fp8_e4m3", block_size=16)

    explanation = attnplug.explain(
        request, Device.parse(product), backend=["torch/sdpa", "auto"], assume_installed=True
    )

    verdict = next(one for one in explanation.verdicts if one.id == "torch/sdpa")
    assert verdict.status.replace("chosen", "eligible") == status
