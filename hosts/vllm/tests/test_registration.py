"""Names in vLLM's enum: which there are, which there are not and why, and how they travel between processes."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug.errors import ManifestError, SettingsError, UnknownBackendError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

registry = pytest.importorskip(
    "vllm.v1.attention.backends.registry", reason="vLLM is not installed here; `make test-hosts` runs these"
)

import attnplug_vllm  # noqa: E402 - it needs vLLM to do anything
from attnplug_vllm import facts, int8, names, registration  # noqa: E402 - likewise
from hosts.vllm.tests.backends import ACME, CONTESTED, fresh_process, offer  # noqa: E402 - see above
from hosts.vllm.tests.enum_of_vllm import restored  # noqa: E402 - see above

takes_names = pytest.mark.skipif(not names.takes_names(), reason="this version of vLLM takes no names as strings")


@pytest.fixture(autouse=True)
def enum() -> Iterator[Any]:
    """VLLM's enum, as it was again after the test."""
    with restored() as found:
        yield found


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A CPU, on which acme/host runs, and the built-in backend."""
    monkeypatch.setattr(facts, "device_kind", lambda: (("device_type", "cpu"),))
    monkeypatch.setattr(facts, "device", attnplug.Device.cpu)
    monkeypatch.setenv("ATTNPLUG_ALLOW", "acme,acme_host,torch")
    with fresh_process():
        offer(tmp_path)
        yield


def own_names(enum: Any) -> set[str]:
    return {name for name in enum.__members__ if names.is_own_name(name)}


def test_attnplug_alone_is_a_choice(enum: Any) -> None:
    registration.register()
    name = names.own_name(())
    assert enum[name].get_class().choice == ()
    assert enum[name].get_class().get_name() == name


@takes_names
def test_what_can_run_here_has_a_name(enum: Any) -> None:
    registration.register()
    assert own_names(enum) == {"ATTNPLUG", "ATTNPLUG_ACME_HOST", "ATTNPLUG_TORCH_SDPA"}
    found = enum["ATTNPLUG_ACME_HOST"].get_class()
    assert found.choice == ("acme/host",)
    assert found.get_name() == "ATTNPLUG_ACME_HOST"
    assert found.full_cls_name() == (names.CLASSES, "ATTNPLUG_ACME_HOST")


@takes_names
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("ATTNPLUG_ACME_HOPPER", "requires device type cuda; the device is cpu"),
        ("ATTNPLUG_FLASH_ATTN_FA2", "not in ATTNPLUG_ALLOW|not installed|allow"),
        ("ATTNPLUG_NOPE", "the names of attnplug's backends are ATTNPLUG, ATTNPLUG_ACME_HOST, ATTNPLUG_TORCH_SDPA"),
    ],
)
def test_naming_what_cannot_run_says_why(enum: Any, name: str, reason: str) -> None:
    registration.register()
    assert name not in enum.__members__
    with pytest.raises(UnknownBackendError, match=reason) as error:
        enum[name]
    assert repr(name) in error.value.problem
    assert error.value.fix


@takes_names
def test_the_kind_of_the_device_comes_before_an_installation(enum: Any) -> None:
    registration.register()
    with pytest.raises(UnknownBackendError) as error:
        enum["ATTNPLUG_ACME_LIBRARY"]
    assert error.value.expected == "'acme/library' cannot run here: requires device type cuda; the device is cpu"
    assert error.value.fix == "name another backend, or ATTNPLUG"


@takes_names
def test_on_the_device_an_installation_is_the_reason(enum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "device_kind", lambda: (("device_type", "cuda"), ("vendor", "nvidia")))
    with pytest.raises(
        UnknownBackendError, match="acme-kernels-of-no-index >=1 is required and not installed"
    ) as error:
        raise registration.refusal("ATTNPLUG_ACME_LIBRARY")
    assert "install acme-kernels-of-no-index >=1" in error.value.fix


@takes_names
def test_a_blocked_backend_says_which_setting(enum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BLOCK", "acme/host")
    attnplug.refresh()
    registration.register()
    with pytest.raises(UnknownBackendError, match="ATTNPLUG_BLOCK"):
        enum["ATTNPLUG_ACME_HOST"]
    assert "ATTNPLUG_TORCH_SDPA" in enum.__members__


@takes_names
def test_two_candidates_of_one_name_have_none(enum: Any, tmp_path: Path) -> None:
    offer(tmp_path, ACME.replace("variants.host", "variants.host_fast"))
    offer(tmp_path, CONTESTED)
    registration.register()
    assert "ATTNPLUG_ACME_HOST_FAST" not in enum.__members__
    with pytest.raises(UnknownBackendError, match="'acme/host_fast' and 'acme_host/fast' have this name") as error:
        enum["ATTNPLUG_ACME_HOST_FAST"]
    assert "ATTNPLUG_BACKEND=acme/host_fast" in error.value.fix


@pytest.mark.skipif(names.takes_names(), reason="this version of vLLM takes names as strings")
def test_the_slot_names_the_setting(enum: Any) -> None:
    registration.register()
    with pytest.raises(UnknownBackendError, match="has the slot CUSTOM") as error:
        enum["ATTNPLUG_ACME_HOST"]
    assert "--attention-backend CUSTOM" in error.value.fix
    assert "ATTNPLUG_BACKEND" in error.value.fix


def test_other_names_are_vllms_own_business(enum: Any) -> None:
    registration.register()
    with pytest.raises(ValueError, match="Unknown attention backend: 'NOPE'"):
        enum["NOPE"]
    assert not hasattr(enum, "ATTNPLUG_NOPE")
    assert not hasattr(enum, "NOPE")
    assert enum["FLASH_ATTN"] is enum.FLASH_ATTN


@pytest.mark.parametrize("table", ["nothing", "of another kind", "fixed"])
def test_without_pythons_table_vllm_says_what_it_says(enum: Any, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Meta(type):
        """An enum that keeps its members elsewhere."""

        def __getattr__(cls, name: str) -> Any:
            if name == "_member_map_" and table == "of another kind":
                return MappingProxyType(enum._member_map_)
            if name == "_member_map_" and table == "nothing":
                raise AttributeError(name)
            return getattr(enum, name)

        def __setattr__(cls, name: str, value: Any) -> None:
            raise AttributeError(f"{name} is fixed")

        def __getitem__(cls, name: str) -> Any:
            return enum[name]

    monkeypatch.setattr(registration, "members", lambda: Meta("Enum", (), {}))
    registration.register()
    name = names.own_name(())
    assert enum[name].get_class().get_name() == name
    with pytest.raises(ValueError, match="Unknown attention backend: 'ATTNPLUG_NOPE'"):
        enum["ATTNPLUG_NOPE"]
    assert not hasattr(enum, "ATTNPLUG_NOPE")


@pytest.mark.parametrize(("device", "count"), [("xpu", 1), ("npu", 1), ("cuda", 0), ("cpu", 0), ("", 0)])
def test_a_platform_without_foreign_backends_is_warned_of_once(
    device: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    registration._warn_of_platform.cache_clear()
    monkeypatch.setattr(facts, "_platform", lambda: SimpleNamespace(device_type=device))
    monkeypatch.setattr(registration._log, "warning", lambda text, *values: said.append(text % values))
    registration.register()
    registration.register()
    assert len(said) == count
    assert all(f"platform '{device}'" in text and "Leave --attention-backend out" in text for text in said)


def test_registering_again_changes_nothing(enum: Any) -> None:
    registration.register()
    before = dict(enum.__members__), dict(registry._ATTN_OVERRIDES)
    registration.register()
    assert (dict(enum.__members__), dict(registry._ATTN_OVERRIDES)) == before


@takes_names
def test_registering_again_adds_what_is_new(enum: Any, tmp_path: Path) -> None:
    registration.register()
    offer(tmp_path, CONTESTED)
    registration.register()
    assert "ATTNPLUG_ACME_HOST_FAST" in enum.__members__


def test_what_another_plugin_registered_stays(enum: Any, caplog: pytest.LogCaptureFixture) -> None:
    log = registration._log
    log.addHandler(caplog.handler)
    slots = [names.CPU, *names.MLA_ON_CPU] if names.takes_names() else [names.CPU, names.SLOT]
    try:
        for slot in slots:
            registry.register_backend(enum[slot], "theirs.Backend")
        registration.register()
    finally:
        log.removeHandler(caplog.handler)
    assert [enum[slot].get_path() for slot in slots] == ["theirs.Backend"] * len(slots)
    said = {record.getMessage() for record in caplog.records}
    assert said == {
        f"Another plugin has registered theirs.Backend for {slot}. attnplug does not replace it; "
        "VLLM_PLUGINS can leave it out"
        for slot in slots
    }


def test_wrong_settings_leave_vllm_its_own(enum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_STRICT", "perhaps")
    attnplug.refresh()
    registration.register()
    assert enum.FLASH_ATTN.get_path().endswith("FlashAttentionBackend")
    asked = {"head_size": 64, "dtype": "bfloat16", "kv_cache_dtype": "auto", "block_size": None}
    (reason,) = enum[names.own_name(())].get_class().validate_configuration(**asked)
    assert "ATTNPLUG_STRICT='perhaps' is set" in reason


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed plugin whose manifest does not parse, beside one without a problem."""
    folder = tmp_path / "site" / "broken_acme-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-acme\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[attnplug.backends]\nbroken_acme = broken_acme\n")
    (package := tmp_path / "site" / "broken_acme").mkdir()
    (package / "__init__.py").write_text("raise SystemExit('a plugin was imported')")
    (package / "attnplug.toml").write_text("api = ")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("ATTNPLUG_ALLOW", "acme,torch,broken_acme")
    attnplug.refresh()
    offer(tmp_path)


@takes_names
def test_a_broken_plugin_hides_no_other(enum: Any, broken: None) -> None:
    registration.register()
    assert own_names(enum) == {"ATTNPLUG", "ATTNPLUG_ACME_HOST", "ATTNPLUG_TORCH_SDPA"}
    with pytest.raises(UnknownBackendError, match="TOML"):
        enum["ATTNPLUG_BROKEN_ACME_FAST"]


def test_a_broken_plugin_is_refused_under_the_strict_setting(
    enum: Any, broken: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(registration._log, "error", lambda text, *values: said.append(text % values))
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    attnplug.refresh()
    registration.register()  # vLLM may run on its own backends
    if names.takes_names():
        assert "TOML" in said[0]
        assert own_names(enum) == {"ATTNPLUG"}
        with pytest.raises(ManifestError, match="TOML"):
            enum["ATTNPLUG_TORCH_SDPA"]
    asked = {"head_size": 64, "dtype": "bfloat16", "kv_cache_dtype": "auto", "block_size": None}
    (reason,) = enum[names.own_name(())].get_class().validate_configuration(**asked)
    assert "TOML" in reason


def test_vllm_starts_where_attnplug_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its core is missing in this process: what asks for no name of attnplug goes on."""
    found = run(
        """
        import importlib.abc, logging, sys

        class Missing(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.partition(".")[0] == "attnplug":
                    raise ModuleNotFoundError("No module named 'attnplug'")

        sys.meta_path.insert(0, Missing())
        from vllm.v1.attention.backends.registry import AttentionBackendEnum as enum
        said = []
        handler = logging.Handler(logging.ERROR)
        handler.emit = said.append
        logging.getLogger("vllm").addHandler(handler)
        import attnplug_vllm
        attnplug_vllm.register()
        assert enum["FLASH_ATTN"] is enum.FLASH_ATTN
        assert [record.name for record in said] == ["vllm.attnplug"]
        assert said[0].exc_info
        try:
            enum["ATTNPLUG"]
        except AttributeError as error:
            print(str(error).splitlines())
        """
    )
    assert found.startswith("[\"the attention backend 'ATTNPLUG' was requested of vLLM\"")
    assert "No module named 'attnplug'" in found.replace("\\", "")
    assert "leave --attention-backend out" in found


def test_a_failure_beside_the_names_leaves_them(enum: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(attnplug_vllm._log, "exception", said.append)
    monkeypatch.setattr(int8, "register_dtypes", lambda: 1 / 0)
    attnplug_vllm.register()
    assert len(said) == 1
    assert enum[names.own_name(())].get_class().choice == ()
    with pytest.raises(UnknownBackendError):
        enum["ATTNPLUG_NOPE"]


def test_members_travel_by_name(enum: Any) -> None:
    registration.register()
    members = [enum[names.own_name(())], *(enum[name] for name in own_names(enum)), enum.FLASH_ATTN, enum.CPU_ATTN]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(members, protocol)) == members
    assert copy.deepcopy(members) == members


def run(code: str, **environment: str) -> str:
    """Run code in a process of its own, as vLLM starts workers, and return what it prints."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip().splitlines()[-1]


def test_registering_imports_no_plugin_and_nothing_heavy() -> None:
    """What vLLM has loaded by then stays all that is heavy; entry points of backends are read, and not imported."""
    found = run(
        """
        import sys
        from vllm.engine.arg_utils import EngineArgs  # what calls the plugins
        from vllm.platforms import current_platform
        current_platform.device_type
        import vllm.model_executor.models.registry  # what the configuration of a model loads next
        before = set(sys.modules)
        import attnplug_vllm
        assert set(sys.modules) - before == {"attnplug_vllm"}
        attnplug_vllm.register()
        roots = {name.partition(".")[0] for name in set(sys.modules) - before}
        print(sorted(roots - {"attnplug", "attnplug_vllm", "attr", "attrs", "packaging", "tomllib"}))
        """
    )
    assert found == "[]"


@takes_names
def test_a_configuration_travels_to_a_spawned_process(tmp_path: Path) -> None:
    """A process that vLLM spawns reads its configuration before it has loaded any plugin."""
    (tmp_path / "worker.py").write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys

            def read(config, answers):
                from vllm.v1.attention.backends.registry import AttentionBackendEnum
                backend = config.attention_config.backend
                kind = config.attention_config.backend_per_kind["sliding_window"]
                answers.put((backend.name, backend is AttentionBackendEnum[backend.name], kind.get_class().choice))

            if __name__ == "__main__":
                import attnplug_vllm
                attnplug_vllm.register()
                from vllm.config import AttentionConfig, DeviceConfig, VllmConfig
                attention = AttentionConfig(
                    backend="attnplug_torch_sdpa", backend_per_kind={"sliding_window": "attnplug"}
                )
                config = VllmConfig(attention_config=attention, device_config=DeviceConfig("cpu"))
                assert config.compute_hash()
                context = multiprocessing.get_context("spawn")
                answers = context.Queue()
                process = context.Process(target=read, args=(config, answers))
                process.start()
                print(answers.get(timeout=120))
                process.join()
            """
        )
    )
    found = run(
        f"import runpy; runpy.run_path({str(tmp_path / 'worker.py')!r}, run_name='__main__')", ATTNPLUG_ALLOW="torch"
    )
    assert found == "('ATTNPLUG_TORCH_SDPA', True, ())"


def test_a_backend_that_is_blocked_there_is_an_error_there() -> None:
    if not names.takes_names():
        pytest.skip("this version of vLLM takes no names as strings")
    data = run(
        """
        import attnplug_vllm, pickle
        attnplug_vllm.register()
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        print(pickle.dumps(AttentionBackendEnum["ATTNPLUG_TORCH_SDPA"]).hex())
        """,
        ATTNPLUG_ALLOW="torch",
    )
    found = run(
        f"""
        import pickle
        try:
            pickle.loads(bytes.fromhex({data!r}))
        except LookupError as error:
            print("ATTNPLUG_BLOCK" in str(error))
        """,
        ATTNPLUG_BLOCK="torch",
    )
    assert found == "True"


def test_errors_keep_their_types() -> None:
    assert issubclass(registration.UnknownNameError, UnknownBackendError)
    assert not issubclass(registration.UnknownNameError, (KeyError, ValueError))
    assert issubclass(SettingsError, ValueError)
