"""vLLM's CPU platform, which returns its own backend whatever was chosen: what it gets in its place, and when."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug.errors import NoBackendError, NotNegotiatedError, UnknownBackendError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")
cpu = pytest.importorskip("vllm.platforms.cpu")

from vllm.v1.attention.backends.registry import register_backend  # noqa: E402 - see above

from attnplug_vllm import backend, facts, latent, names, registration  # noqa: E402 - it needs vLLM
from hosts.vllm.tests.enum_of_vllm import restored  # noqa: E402 - see above


@pytest.fixture(autouse=True)
def enum(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """VLLM's enum with the names of a CPU."""
    monkeypatch.setattr(facts, "device_kind", lambda: (("device_type", "cpu"),))
    monkeypatch.setattr(facts, "device", attnplug.Device.cpu)
    with restored() as found:
        registration.register()
        yield found


def choose(monkeypatch: pytest.MonkeyPatch, member: Any, kinds: Any = None, **model: Any) -> Any:
    """Make a configuration current that chooses a member, and return what vLLM's CPU platform gets."""
    known = SimpleNamespace(use_mla=False, is_mm_prefix_lm=False, rswa_window=None)
    vars(known).update(model)
    current = SimpleNamespace(
        attention_config=SimpleNamespace(backend=member, backend_per_kind=kinds or {}),
        model_config=known,
        parallel_config=SimpleNamespace(prefill_context_parallel_size=model.pop("ranks", 1)),
        speculative_config=None,
    )
    monkeypatch.setattr(facts, "current_config", lambda: current)
    asked = SimpleNamespace(use_mla=known.use_mla, use_sparse=False, kv_cache_dtype="auto")
    module, _, name = cpu.CpuPlatform.get_attn_backend_cls(member, asked).rpartition(".")
    assert module == names.CLASSES
    assert name in (names.MLA_ON_CPU if known.use_mla else (names.CPU,))
    return getattr(backend, name)


def test_another_choice_gets_vllms_own(monkeypatch: pytest.MonkeyPatch, enum: Any) -> None:
    for member in (None, enum.CPU_ATTN, enum.FLASH_ATTN):
        path = enum.CPU_ATTN.value.rpartition(".")
        found = choose(monkeypatch, member)
        assert (found.__module__, found.__name__) == (path[0], path[2])


def test_a_name_of_ours_gets_its_class(monkeypatch: pytest.MonkeyPatch, enum: Any) -> None:
    assert choose(monkeypatch, enum[names.own_name(())]) is backend.backend_class(())
    if names.takes_names():
        found = choose(monkeypatch, enum["ATTNPLUG_TORCH_SDPA"])
        assert found is backend.backend_class(("torch/sdpa",))
        assert enum[found.get_name()].name == "ATTNPLUG_TORCH_SDPA"


def test_without_a_configuration_it_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "current_config", lambda: None)
    assert getattr(backend, names.CPU).__module__.startswith("vllm.")


def test_kinds_of_layers_cannot_differ(monkeypatch: pytest.MonkeyPatch, enum: Any) -> None:
    ours = enum[names.own_name(())]
    assert choose(monkeypatch, ours, {"sliding_window": ours}) is backend.backend_class(())
    for named, kinds in ((ours, {"sliding_window": enum.CPU_ATTN}), (None, {"sliding_window": ours})):
        with pytest.raises(NoBackendError, match="does not say for which kind"):
            choose(monkeypatch, named, kinds)


@pytest.mark.parametrize(
    ("model", "word"),
    [
        pytest.param(model, word, id=name, marks=pytest.mark.feature(name, kind="refused"))
        for name, model, word in (
            ("R-SWA", {"rswa_window": 128}, "R-SWA"),
            ("PCP", {"ranks": 2}, "PCP"),
        )
    ],
)
def test_what_is_not_served_is_refused_there_too(
    monkeypatch: pytest.MonkeyPatch, enum: Any, model: dict[str, Any], word: str
) -> None:
    with pytest.raises(NoBackendError, match=word) as error:
        choose(monkeypatch, enum[names.own_name(())], **model)
    assert "leave --attention-backend out" in error.value.fix


@pytest.fixture(params=[False, True], ids=["without AMX", "with AMX"])
def amx(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose tiles vLLM uses for latent attention, or does not."""
    monkeypatch.setattr(cpu.CpuPlatform, "get_cpu_architecture", classmethod(lambda _: cpu.CpuArchEnum.X86))
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: request.param)


@pytest.mark.feature("MLA", kind="selection")
@pytest.mark.needs_vllm(">=0.32")
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("name", ["ATTNPLUG", "ATTNPLUG_TORCH_SDPA"])
def test_a_name_of_ours_gets_the_class_for_latents(monkeypatch: pytest.MonkeyPatch, enum: Any, name: str) -> None:
    found = choose(monkeypatch, enum[name], use_mla=True)

    assert found is backend.backend_class(registration.choice_of(name), latent=True)
    assert (found.get_name(), found.is_mla()) == (name, True)
    assert getattr(backend, name) is found  # as vLLM finds it elsewhere
    assert issubclass(found.get_impl_cls(), latent.LatentImpl)
    assert found.get_builder_cls().choice == found.choice


@pytest.mark.parametrize(
    "asked", [{"sliding_window": 64}, {"logits_soft_cap": 30.0}, {"alibi_slopes": [0.5]}, {"indexer": 1}, {"sinks": 1}]
)
def test_a_layer_of_latents_refuses_what_vllms_prefills_do_not_apply(asked: dict[str, Any]) -> None:
    usual = {"num_heads": 2, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "kv_cache_dtype": "auto"}
    usual |= dict.fromkeys(("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name"))
    with pytest.raises(NotNegotiatedError) as error:
        latent.LatentImpl(**usual | {"attn_type": "decoder", "kv_lora_rank": 512} | asked)

    assert error.value.problem == f"vLLM's layer of latent attention has {next(iter(asked))}"
    assert "leave --attention-backend out" in error.value.fix


@pytest.mark.needs_vllm(">=0.32")
@pytest.mark.usefixtures("amx")
@pytest.mark.parametrize("name", [None, "CPU_ATTN", "FLASH_ATTN"])
def test_latent_attention_on_another_choice_is_vllms_own(
    monkeypatch: pytest.MonkeyPatch, enum: Any, name: str | None
) -> None:
    asked = SimpleNamespace(use_mla=True, use_sparse=False, kv_cache_dtype="auto")
    path = cpu.CpuPlatform.get_attn_backend_cls(None, asked).rpartition(".")
    own = enum[path[2]].value.rpartition(".")
    monkeypatch.setattr(backend, "import_module", lambda module: SimpleNamespace(**{own[2]: module}))
    assert choose(monkeypatch, name and enum[name], use_mla=True) == own[0]


@pytest.mark.needs_vllm("<0.32")
def test_vllm_itself_has_no_latent_attention_there(monkeypatch: pytest.MonkeyPatch, enum: Any) -> None:
    with pytest.raises(NotImplementedError, match="MLA is not supported on CPU"):
        choose(monkeypatch, enum[names.own_name(())], use_mla=True)


@pytest.mark.needs_vllm(">=0.32")
def test_an_empty_slot_is_refused(monkeypatch: pytest.MonkeyPatch, enum: Any) -> None:
    for kinds in ({}, {"sliding_window": enum.CPU_ATTN}):
        with pytest.raises(NoBackendError, match="no plugin has registered it") as error:
            choose(monkeypatch, enum.CUSTOM, kinds)
        assert error.value.fix == "pass --attention-backend ATTNPLUG"
    register_backend(enum.CUSTOM, "theirs.Backend")  # vLLM's CPU platform ignores it, and attnplug does too
    assert choose(monkeypatch, enum.CUSTOM).__module__.startswith("vllm.")


@pytest.mark.skipif(not names.takes_names(), reason="this version of vLLM takes no names as strings")
def test_what_was_blocked_meanwhile_is_refused(monkeypatch: pytest.MonkeyPatch, enum: Any) -> None:
    monkeypatch.setenv("ATTNPLUG_BLOCK", "torch")
    attnplug.refresh()
    try:
        with pytest.raises(UnknownBackendError, match="ATTNPLUG_BLOCK"):
            choose(monkeypatch, enum["ATTNPLUG_TORCH_SDPA"])
    finally:
        monkeypatch.undo()
        attnplug.refresh()
