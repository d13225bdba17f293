"""
The smoke test of one distribution, in an environment that has it and what it requires: ``python -I smoke.py NAME``.

It imports what is installed there and nothing of the repository.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import distribution
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_REQUEST: Final = ["--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "8", "--dtype", "bfloat16"]
_OURS: Final = "attnplug"


class SmokeError(Exception):
    """A distribution does not do what its smoke test expects."""


def need(holds: object, problem: str) -> None:
    """Raise unless something holds."""
    if not holds:
        raise SmokeError(problem)


def command(*words: str, codes: tuple[int, ...] = (0,), folder: str | None = None) -> str:
    """Run ``attnplug`` as its script, and return what it prints."""
    script = Path(sys.executable).with_name("attnplug")
    done = subprocess.run([str(script), *words], capture_output=True, text=True, check=False, cwd=folder)  # noqa: S603 - the installed command
    need(done.returncode in codes, f"attnplug {' '.join(words)} exits with {done.returncode}: {done.stderr}")
    return done.stdout


def core() -> None:
    """Core alone, without torch: it imports, lists, decides and explains."""
    import attnplug  # noqa: PLC0415 - as a user does, once what is checked before it was

    need(find_spec("torch") is None, "torch is installed, and core is to be tested without it")
    need(command("--version").split() == ["attnplug", attnplug.__version__], "--version prints another version")
    backends = json.loads(command("list", "--json"))["backends"]
    need(any(each["built_in"] for each in backends), "`attnplug list` has no built-in backend")
    shown = command("explain", *_REQUEST, "--device", "cpu", codes=(1,))
    need("torch" in shown, "`attnplug explain` does not say that torch is missing")
    request = attnplug.Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16")
    assumed = attnplug.explain(request, "cpu", assume_installed=True)
    need(assumed.chosen is not None, "nothing is chosen where kernel libraries are assumed to be installed")
    need("torch" not in sys.modules, "torch was imported")


def core_with_torch() -> None:
    """Core with torch: a dense call on the CPU equals torch's own."""
    import torch  # noqa: PLC0415 - likewise

    import attnplug  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 16, 4, 32)
    found = attnplug.attention(query, key, value)
    turned = (each.transpose(1, 2) for each in (query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(*turned).transpose(1, 2)
    need(torch.allclose(found, expected, atol=1e-5), "attnplug.attention differs from torch's own")


def kit() -> None:
    """Write a plugin project, and check its manifest."""
    with TemporaryDirectory() as folder:
        command("new", "acme", folder=folder)
        command("check", "attnplug-acme", folder=folder)
    need("acme" not in command("list"), "the project is installed, and nothing installed it")


def transformers_host() -> None:
    """Generate with a small model of random weights, as the model does by itself."""
    import torch  # noqa: PLC0415 - as above
    import transformers  # noqa: PLC0415 - likewise

    from attnplug_transformers.engine import Engine  # noqa: PLC0415 - likewise

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval()
    prompt = [3, 1, 4, 1, 5]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :].tolist()
    with Engine(model) as engine:
        found = engine.generate([prompt], max_new_tokens=4)
    need(list(found[0]) == expected, f"the engine generates {found}, the model {expected}")


def vllm_host() -> None:
    """Without vLLM: it is found as a plugin of vLLM and as an engine, and says that vLLM is missing."""
    need(find_spec("vllm") is None, "vLLM is installed, and the host is to be tested without it")
    groups = {entry.group for entry in distribution("attnplug-vllm").entry_points}
    need({"vllm.general_plugins", "attnplug.engines"} <= groups, f"its entry points are {groups}")
    command("explain", *_REQUEST, "--engine", "vllm", codes=(0, 1, 2))


def sglang_host() -> None:
    """Without SGLang: it is found as a plugin of SGLang, and every candidate has a name."""
    from attnplug_sglang.registration import names  # noqa: PLC0415 - as above

    need(find_spec("sglang") is None, "SGLang is installed, and the host is to be tested without it")
    groups = {entry.group for entry in distribution("attnplug-sglang").entry_points}
    need("sglang.srt.plugins" in groups, f"its entry points are {groups}")
    need({"attnplug", "attnplug:torch/sdpa"} <= set(names()), f"its names are {sorted(names())}")


def torch_host() -> None:
    """Route a call of torch's own attention to a backend, and find the same numbers."""
    import torch  # noqa: PLC0415 - likewise

    import attnplug_torch  # noqa: PLC0415 - as above

    torch.manual_seed(0)
    query = torch.randn(1, 4, 10, 64)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(query, query, query, is_causal=True)
    attnplug_torch.register()
    torch.nn.attention.activate_flash_attention_impl("attnplug")
    found = attend(query, query, query, is_causal=True)
    torch.nn.attention.restore_flash_attention_impl()
    need(torch.allclose(found, expected, atol=1e-5), "torch's attention differs on a backend")
    need(any(route.backend for route in attnplug_torch.report()), "no call went to a backend")


def comfyui_host() -> None:
    """Give a model like ComfyUI's the attention of attnplug, and write the folder of the nodes."""
    import torch  # noqa: PLC0415 - likewise

    import attnplug_comfyui  # noqa: PLC0415 - as above

    class Model:
        def __init__(self) -> None:
            self.model_options: dict[str, Any] = {"transformer_options": {}}

        def clone(self) -> Model:
            return Model()

    torch.manual_seed(0)
    query = torch.randn(1, 10, 4 * 64)
    heads = query.view(1, 10, 4, 64).transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
    model = attnplug_comfyui.patch(Model())
    found = attnplug_comfyui.override_of(model)(torch.add, query, query, query, 4)
    need(torch.allclose(found, expected, atol=1e-5), "attention differs on a backend")
    need(any(route.backend for route in attnplug_comfyui.report(model)), "no call went to a backend")
    with TemporaryDirectory() as folder:
        (Path(folder) / "custom_nodes").mkdir()
        need((attnplug_comfyui.install(folder) / "__init__.py").exists(), "the folder of the nodes is not written")


def diffusers_host() -> None:
    """Bind a model of diffusers, and find the same numbers."""
    import diffusers  # noqa: PLC0415 - as above
    import torch  # noqa: PLC0415 - likewise

    import attnplug_diffusers  # noqa: PLC0415 - likewise

    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=1, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "encoder_hidden_states": torch.randn(1, 12, 16),
        "timestep": torch.tensor([1]),
    }
    with torch.no_grad():
        expected = model(**inputs).sample
        with attnplug_diffusers.bind(model) as binding:
            found = model(**inputs).sample
    need(torch.allclose(found, expected, atol=1e-5), "the model differs on a backend")
    need(len(binding.modules) == 2, f"what is bound is {binding.modules}")


def plugin(name: str) -> None:
    """Find every backend of a plugin with `attnplug list`: with a manifest, and not broken."""
    listed = json.loads(command("list", "--json"))["backends"]
    entries = [entry.name for entry in distribution(name).entry_points if entry.group == "attnplug.backends"]
    need(entries, "it offers no backend")
    for entry in entries:
        found: list[Any] = [each for each in listed if each["name"] == entry]
        need(len(found) == 1, f"`attnplug list` has {len(found)} backends {entry!r}")
        need(
            found[0]["distribution"] == f"{name} {distribution(name).version}", f"{entry!r} is of another distribution"
        )
        broken = [each["id"] for each in found[0]["variants"] if each["availability"] in ("broken", "absent")]
        need(found[0]["manifest"] and not broken, f"the backend {entry!r} is broken: {broken}")


TESTS: Final[Mapping[str, Callable[[], None]]] = MappingProxyType(
    {
        "attnplug": core,
        "attnplug[torch]": core_with_torch,
        "attnplug-kit": kit,
        "attnplug-transformers": transformers_host,
        "attnplug-vllm": vllm_host,
        "attnplug-diffusers": diffusers_host,
        "attnplug-sglang": sglang_host,
        "attnplug-torch": torch_host,
        "attnplug-comfyui": comfyui_host,
    }
)
"""The tests by distribution; any other one is a plugin."""


def common(name: str) -> None:
    """Whatever it is: its modules are found, from where it was installed, and no other of this project's is there."""
    here = Path(sys.prefix).resolve()
    for entry in distribution(name).entry_points:
        module = find_spec(entry.module)
        need(module is not None and module.origin, f"the module {entry.module!r} of an entry point is missing")
        need(
            module is not None and here in Path(str(module.origin)).resolve().parents, f"{entry.module!r} is elsewhere"
        )


def main(arguments: list[str]) -> int:
    """Run the test of one distribution, and return the exit status."""
    name = arguments[0]
    try:
        common(name.partition("[")[0])
        TESTS.get(name, lambda: plugin(name))()
    except SmokeError as error:
        print(f"{name}: {error}")
        return 1
    print(f"{name}: its smoke test passes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
