"""vLLM's own selector on a CUDA device of each generation: what it gets for a name of attnplug, and what it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug.errors import NoBackendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")
torch = pytest.importorskip("torch")

from attnplug_vllm import backend, facts, model, names, registration, selector  # noqa: E402 - it needs vLLM
from hosts.vllm.tests.backends import fresh_process, offer  # noqa: E402 - see above
from hosts.vllm.tests.cuda_platform import use_cuda  # noqa: E402 - see above

CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]
HOPPER, PLAIN = ("acme/hopper",), ("acme/plain",)


@pytest.fixture(params=CAPABILITIES, ids=lambda each: f"{each[0]}.{each[1]}")
def capability(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: tuple[int, int]) -> Iterator[Any]:
    """A CUDA device, with the backends of this test and the built-in one."""
    yield from _with_backends(monkeypatch, tmp_path, capability)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """An H100, likewise."""
    yield from _with_backends(monkeypatch, tmp_path, (9, 0))


def _with_backends(monkeypatch: pytest.MonkeyPatch, folder: Path, capability: tuple[int, int]) -> Iterator[Any]:
    monkeypatch.setenv("ATTNPLUG_ALLOW", "acme,torch")
    found = use_cuda(monkeypatch, capability)
    with fresh_process():
        offer(folder)
        yield found


def ask(choice: tuple[str, ...], **changes: Any) -> list[str]:
    """Return what a class answers to vLLM's selector."""
    asked = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, **changes}
    return backend.backend_class(choice).validate_configuration(**asked, device_capability=None)


def select(platform: Any, choice: tuple[str, ...], **changes: Any) -> str:
    """Return what vLLM's own selector returns for the member of a choice."""
    from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: PLC0415 - of the installed version

    asked = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": None, **changes}
    member = SimpleNamespace(get_class=lambda: backend.backend_class(choice), name=names.own_name(choice))
    return platform.get_attn_backend_cls(member, AttentionSelectorConfig(**asked))


def test_attnplug_decides_on_every_generation(platform: Any) -> None:
    assert select(platform, ()) == f"{names.CLASSES}.{names.own_name(())}"


def test_a_named_backend_is_that_one_or_an_error(platform: Any, capability: tuple[int, int]) -> None:
    if capability == (9, 0):
        assert select(platform, HOPPER).startswith(names.CLASSES)
        return
    with pytest.raises(ValueError, match="is not valid for this configuration") as error:
        select(platform, HOPPER)
    major, minor = capability
    assert f"requires compute capability 9.0; the device has {major}.{minor}" in str(error.value)
    assert "fix: run on cuda:9.0" in str(error.value)


def test_a_backend_without_its_library(platform: Any) -> None:
    with pytest.raises(ValueError, match="acme-kernels-of-no-index >=1 is required and not installed"):
        select(platform, ("acme/library",))


def test_a_blocked_backend(platform: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BLOCK", "acme")
    attnplug.refresh()
    with pytest.raises(ValueError, match="ATTNPLUG_BLOCK"):
        select(platform, PLAIN)
    assert select(platform, ())
    assert facts.select(facts.layer_requirements(head_size=128, dtype="bfloat16"), ()).backend == "torch"


def of_flag(flag: str) -> Any:
    """Return the parameter of a flag, with the feature of vLLM that it is."""
    name = {"use_rswa": "R-SWA", "use_pcp": "PCP"}.get(flag)
    return pytest.param(flag, marks=[pytest.mark.feature(name, kind="refused")] if name else [])


@pytest.mark.parametrize("flag", [of_flag(flag) for flag in sorted(selector.NOT_SERVED)])
def test_what_is_not_served_is_refused_by_name(hopper: Any, flag: str) -> None:
    (reason,) = ask((), **{flag: True})
    assert reason == selector.NOT_SERVED[flag]
    word = {"use_sparse": "indexer"}.get(flag, flag.removeprefix("use_").replace("_", " ").upper())
    assert word.casefold() in reason.replace("-", "").replace("_", " ").casefold()


@pytest.mark.feature("mm_prefix", kind="selection")
def test_spans_are_served_where_a_manifest_has_them(hopper: Any) -> None:
    assert ask(("torch/sdpa",), use_mm_prefix=True) == []
    assert ask(("torch/sdpa",), use_mm_prefix=True, use_non_causal=True) == []
    (reason,) = ask(("torch/flex",), use_mm_prefix=True)
    assert "does not support mm_prefix" in reason
    assert backend.backend_class(("torch/sdpa",)).supports_mm_prefix()
    latent = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True}
    (reason,) = selector.validate(latent | {"use_mm_prefix": True}, ("torch/sdpa",), latent=True)
    assert "latent attention with bidirectional spans (mm_prefix)" in reason


@pytest.mark.feature("MLA", kind="selection")
def test_a_class_answers_for_its_kind_of_attention(hopper: Any) -> None:
    """A target with latent attention and a drafter without it have one name in vLLM, and one class each."""
    asked = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64}
    mixed = ["layers with latent attention beside layers without it are not served by attnplug"]

    assert selector.validate({**asked, "use_mla": True}, ("torch/sdpa",), latent=True) == []
    assert selector.validate({**asked, "use_mla": True}, ("torch/sdpa",)) == mixed
    assert selector.validate({**asked, "use_mla": False}, ("torch/sdpa",), latent=True) == mixed
    (reason,) = selector.validate({**asked, "use_mla": True}, ("torch/flex",), latent=True)
    assert "latent" in reason


@pytest.mark.feature("MLA", "DCP", kind="selection")
def test_ranks_of_latents_are_requests_with_all_their_heads(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True}
    model_config = SimpleNamespace(
        get_num_attention_heads=lambda _: 16,
        hf_text_config=SimpleNamespace(kv_lora_rank=512),
        is_mm_prefix_lm=False,
        rswa_window=None,
    )
    current = SimpleNamespace(
        model_config=model_config,
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_mode=None),
    )
    engine = {"dcp_size": 4, "decode_query_len": 1}
    monkeypatch.setattr(facts, "current_config", lambda: current)
    monkeypatch.setattr(facts, "engine_fields", lambda: dict(engine))

    (request,) = selector.layers(asked)

    assert (request.num_q_heads, request.dcp_size, request.return_lse) == (64, 1, True)
    assert selector.validate(asked, ("torch/sdpa",), latent=True) == []
    assert backend.backend_class(("torch/sdpa",), latent=True).supports_dcp()
    engine["decode_query_len"] = 3
    (reason,) = selector.validate(asked, ("torch/sdpa",), latent=True)
    assert "speculative decoding" in reason
    assert "--decode-context-parallel-size 1" in reason


@pytest.mark.feature("MLA", "DCP", kind="selection")
def test_a_request_for_ranks_alone_needs_lses(hopper: Any) -> None:
    asked = {"head_size": 576, "dtype": torch.bfloat16, "use_mla": True}

    (request,) = selector.layers({**asked, "use_dcp": True})
    (other,) = selector.layers(asked)

    assert (request.return_lse, other.return_lse) == (True, False)


def test_cross_attention_is_refused_by_name(hopper: Any) -> None:
    (reason,) = ask(("torch/sdpa",), attn_type="encoder_decoder")
    assert "attn_type='encoder_decoder'" in reason
    assert not backend.backend_class(("torch/sdpa",)).supports_attn_type("encoder_decoder")
    assert backend.backend_class(("torch/sdpa",)).supports_attn_type("encoder_only")


def test_a_field_that_is_not_known_is_refused(hopper: Any) -> None:
    assert ask((), use_time_travel=True) == ["vLLM requests use_time_travel=True, which attnplug-vllm does not know"]
    assert ask((), use_time_travel=False) == []


def test_every_reason_is_given_at_once(hopper: Any) -> None:
    found = "\n".join(ask(PLAIN, use_pcp=True, has_sink=True, head_size=100, use_batch_invariant=True))
    for word in ("prefill context parallelism", "sinks=True", "head_size=100", "batch_invariant=True"):
        assert word in found


@pytest.mark.parametrize(
    ("changes", "method", "arguments"),
    [
        ({"has_sink": True}, "supports_sink", ()),
        ({"use_per_head_quant_scales": True}, "supports_per_head_quant_scales", ()),
        ({"has_sliding_window": True}, "supports_sliding_window", ()),
        ({"use_non_causal": True}, "supports_non_causal", ()),
        ({"use_batch_invariant": True}, "supports_batch_invariance", ()),
        ({"use_dcp": True}, "supports_dcp", ()),
        ({"kv_cache_dtype": "fp8"}, "supports_kv_cache_dtype", ("fp8",)),
        ({"use_kv_connector": True}, None, ()),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_features_are_what_manifests_declare(hopper: Any, changes: dict[str, Any], method: str, arguments: Any) -> None:
    assert ask(HOPPER, **changes) == []
    assert len(ask(PLAIN, **changes)) == 1
    if method:
        assert getattr(backend.backend_class(HOPPER), method)(*arguments) is True
        assert getattr(backend.backend_class(PLAIN), method)(*arguments) is False


def test_single_answers_come_from_manifests(hopper: Any) -> None:
    of_hopper, of_plain = backend.backend_class(HOPPER), backend.backend_class(PLAIN)
    assert of_hopper.supports_alibi_sqrt()
    assert not of_plain.supports_alibi_sqrt()
    assert of_hopper.supports_head_size(256)
    assert not of_hopper.supports_head_size(257)
    assert of_hopper.supports_dtype(torch.bfloat16)
    assert not of_hopper.supports_dtype(torch.float32)
    assert of_hopper.supported_dtypes == [torch.float16, torch.bfloat16]
    assert "fp8" in of_hopper.supported_kv_cache_dtypes
    assert "fp8" not in of_plain.supported_kv_cache_dtypes
    assert of_hopper.supports_kv_cache_dtype(None)
    assert not of_hopper.supports_kv_cache_dtype("turboquant_k8v4")
    assert not of_hopper.supports_kv_cache_dtype("fp8_ds_mla")
    assert of_hopper.supports_attn_type("decoder")
    assert not of_hopper.supports_attn_type("encoder_only")
    assert of_hopper.supports_compute_capability(None)
    assert not backend.backend_class(("acme/host",)).supports_compute_capability(None)
    for name in ("mm_prefix", "rswa", "pcp", "device_cpu_query_lens_mismatch"):
        assert getattr(of_hopper, f"supports_{name}")() is False


def test_a_combination_is_refused_with_its_reason(hopper: Any) -> None:
    assert ask(HOPPER, has_sink=True) == []
    assert ask(HOPPER, kv_cache_dtype="fp8") == []
    (reason,) = ask(HOPPER, has_sink=True, kv_cache_dtype="fp8")
    assert "the kernels with sinks read 16-bit keys" in reason
    assert "pass --kv-cache-dtype" in reason


def test_a_fix_is_in_the_words_of_the_command_line(hopper: Any) -> None:
    (reason,) = ask(PLAIN, kv_cache_dtype="fp8", use_batch_invariant=True, block_size=8)
    assert "pass --kv-cache-dtype bfloat16" in reason
    assert "set VLLM_BATCH_INVARIANT=0" in reason
    assert "pass --block-size 16" in reason


def test_a_format_of_other_kernels_is_refused_by_name(hopper: Any) -> None:
    (reason,) = ask((), kv_cache_dtype="fp8_per_token_head")
    assert "--kv-cache-dtype fp8_per_token_head was given to vLLM" in reason


def test_block_sizes_are_what_manifests_declare(hopper: Any) -> None:
    from vllm.v1.attention.backend import MultipleOf  # noqa: PLC0415 - of the installed version

    bounded, open_ended = backend.backend_class(HOPPER), backend.backend_class(PLAIN)
    assert bounded.get_supported_kernel_block_sizes() == [32, 64, 96, 128]
    sizes = open_ended.get_supported_kernel_block_sizes()
    assert sizes[0] == 16
    assert isinstance(sizes[1], MultipleOf)
    assert sizes[1].base == 16
    assert bounded.get_preferred_block_size(16) == 32
    assert open_ended.get_preferred_block_size(16) == 16
    assert ask(HOPPER, block_size=64) == []
    assert ask(HOPPER, block_size=16)


def of_model(monkeypatch: pytest.MonkeyPatch, config: Any, *, ranks: int = 1, **fields: Any) -> None:
    """Make a model current in vLLM, as far as its configuration says."""
    text = config.get_text_config()
    heads = SimpleNamespace(
        hf_config=config,
        hf_text_config=text,
        get_head_size=lambda: text.head_dim,
        get_num_attention_heads=lambda _: text.num_attention_heads // ranks,
        get_num_kv_heads=lambda _: max(1, text.num_key_value_heads // ranks),
        get_sliding_window=lambda: getattr(text, "sliding_window", None),
    )
    current = SimpleNamespace(
        model_config=heads,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, decode_context_parallel_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=True),
        compilation_config=SimpleNamespace(cudagraph_mode=None, static_forward_context={}),
        attention_config=SimpleNamespace(use_non_causal=False),
        speculative_config=None,
        kv_transfer_config=None,
    )
    for name, value in fields.items():
        setattr(current, name, value)
    monkeypatch.setattr(facts, "current_config", lambda: current)


def gemma(**fields: Any) -> Any:
    """A model with a soft cap, and windows in every second layer."""
    from transformers import Gemma2Config  # noqa: PLC0415 - beside vLLM only

    shape = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 2}
    return Gemma2Config(**{**shape, "sliding_window": 1024, "attn_logit_softcapping": 30.0, **fields})


def test_head_counts_and_soft_cap_come_from_the_model(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_model(monkeypatch, gemma())
    assert ask(HOPPER) == []
    of_model(monkeypatch, gemma(num_attention_heads=32))
    (reason,) = ask(HOPPER)
    assert "the kernels with a soft cap serve up to four query heads" in reason
    of_model(monkeypatch, gemma(attn_logit_softcapping=None, num_attention_heads=32))
    assert ask(HOPPER) == []


def test_head_counts_are_those_of_a_rank(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_model(monkeypatch, gemma(num_attention_heads=32), ranks=4)
    assert [each["num_q_heads"] for each in model.alike(128, is_windowed=False)] == [8]
    of_model(monkeypatch, gemma(), ranks=8)
    assert [each["num_kv_heads"] for each in model.alike(128, is_windowed=False)] == [1]


def test_the_length_of_a_window_comes_from_the_model(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_model(monkeypatch, gemma(sliding_window=4096))
    assert ask(HOPPER, has_sliding_window=True) == []
    of_model(monkeypatch, gemma(sliding_window=8192))
    (reason,) = ask(HOPPER, has_sliding_window=True)
    assert "sliding_window=8192" in reason
    assert ask(HOPPER, has_sliding_window=False) == []


def test_alibi_comes_from_the_model(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BloomConfig  # noqa: PLC0415 - beside vLLM only

    of_model(monkeypatch, BloomConfig(n_head=8, hidden_size=1024))
    (reason,) = ask(HOPPER)
    assert "alibi=linear" in reason


def test_an_unknown_model_type_is_read_as_vllm_does(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = gemma(num_attention_heads=32)
    config.model_type = "of_tomorrow"
    of_model(monkeypatch, config)
    (reason,) = ask(HOPPER)
    assert "the kernels with a soft cap serve up to four query heads" in reason


def test_without_a_model_a_window_has_an_odd_length(hopper: Any) -> None:
    (requirements,) = selector.layers({"head_size": 64, "dtype": torch.float16, "has_sliding_window": True})
    assert requirements.sliding_window == facts.UNKNOWN_WINDOW
    assert requirements.late == ("block_size", "num_q_heads", "num_kv_heads")


def test_what_is_known_late_is_refused_with_a_setting(hopper: Any) -> None:
    requirements = facts.layer_requirements(head_size=128, dtype="bfloat16", logits_soft_cap=20.0)
    with pytest.raises(NoBackendError, match=r"logits_soft_cap=20\.0") as error:
        facts.select(requirements, PLAIN)
    fix = "pass --attention-backend ATTNPLUG_" if names.takes_names() else "set ATTNPLUG_BACKEND="
    assert error.value.fix.startswith(fix)


def test_nothing_can_serve_names_vllms_own(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_ALLOW", "acme")
    attnplug.refresh()
    with pytest.raises(NoBackendError) as error:
        facts.select(facts.layer_requirements(head_size=128, dtype="bfloat16", attention_chunk=7, alibi="sqrt"), PLAIN)
    assert "leave --attention-backend out" in error.value.fix


def test_drafts_and_asynchronous_scheduling(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = SimpleNamespace(num_speculative_tokens=3)
    of_model(monkeypatch, gemma(), speculative_config=drafts)
    (requirements,) = selector.layers({"head_size": 128, "dtype": torch.bfloat16})
    assert requirements.decode_query_len == 4
    assert requirements.seq_lens_cpu_kind == "upper_bound"
    of_model(monkeypatch, gemma())
    (requirements,) = selector.layers({"head_size": 128, "dtype": torch.bfloat16})
    assert (requirements.decode_query_len, requirements.seq_lens_cpu_kind) == (1, "exact")


def test_a_candidate_with_graphs_comes_first(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mode = SimpleNamespace(has_full_cudagraphs=lambda: True)
    compilation = SimpleNamespace(cudagraph_mode=mode, static_forward_context={})
    requirements = facts.layer_requirements(head_size=128, dtype="bfloat16", num_q_heads=8, num_kv_heads=8)
    of_model(monkeypatch, gemma(), compilation_config=compilation)
    assert facts.select(requirements, ("acme/plain", "acme/hopper")).id == "acme/hopper"
    assert facts.select(requirements, PLAIN).agreement.cudagraph == "never"
    of_model(monkeypatch, gemma())
    assert facts.select(requirements, ("acme/plain", "acme/hopper")).id == "acme/plain"


def test_a_kv_connector_gets_vllms_own_shape(hopper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    of_model(
        monkeypatch,
        gemma(attn_logit_softcapping=None),
        kv_transfer_config=SimpleNamespace(is_kv_transfer_instance=True),
    )
    assert facts.engine_fields()["kv_cache_form"] == "packed"
    (reason,) = ask(PLAIN, use_kv_connector=True)
    assert "leave --kv-transfer-config out" in reason


def test_an_encoder_has_no_kv_cache(hopper: Any) -> None:
    asked = {"head_size": 64, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": 16}
    (requirements,) = selector.layers({**asked, "attn_type": "encoder_only"})
    assert (requirements.paged, requirements.block_size, requirements.kv_cache_dtype) == (False, None, "bfloat16")


def test_decisions_are_in_vllms_log(hopper: Any, caplog: pytest.LogCaptureFixture) -> None:
    facts._logged.clear()
    caplog.handler.setLevel("INFO")
    log = facts._log
    log.addHandler(caplog.handler)
    log.setLevel("DEBUG")
    try:
        ask(HOPPER)
        ask(HOPPER)
    finally:
        log.removeHandler(caplog.handler)
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert [line for line in lines if line.startswith("attnplug selects acme/hopper on cuda:9.0")] == lines


def test_registered_names_resolve_to_their_classes(hopper: Any) -> None:
    if not names.takes_names():
        pytest.skip("this vLLM takes no names as strings")
    assert registration.choices()["ATTNPLUG_ACME_HOPPER"] == HOPPER
    assert "ATTNPLUG_ACME_HOST" not in registration.choices()
    assert getattr(backend, "ATTNPLUG_ACME_HOPPER") is backend.backend_class(HOPPER)  # noqa: B009 - as vLLM resolves
