"""
Attention of a real ComfyUI with the override. A program, run in its checkout: it writes what it found as JSON.

ComfyUI reads its command line when it is imported, so that this runs in a process apart: `test_real_comfyui.py`.
"""

from __future__ import annotations

import inspect
import json
import sys

sys.argv = ["main.py", "--cpu", *sys.argv[1:]]
import comfy.options  # noqa: E402 - reads the command line above

comfy.options.enable_args_parsing()

import comfy.ops  # noqa: E402
import torch  # noqa: E402
from comfy.ldm.flux.model import Flux, FluxParams  # noqa: E402
from comfy.ldm.modules import attention  # noqa: E402
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel  # noqa: E402
from comfy.ldm.wan.model import WanModel  # noqa: E402
from comfy.model_patcher import ModelPatcher  # noqa: E402
from comfyui_version import __version__  # noqa: E402

import attnplug_comfyui  # noqa: E402

CPU = torch.device("cpu")
OPERATIONS = {"device": CPU, "dtype": torch.float32, "operations": comfy.ops.disable_weight_init}


def signatures():
    """Return the parameters of each attention function, None where there is no default."""
    names = [name for name, one in vars(attention).items() if name.startswith("attention") and callable(one)]
    found = {}
    for name in names:
        function = inspect.unwrap(getattr(attention, name))
        given = inspect.signature(function).parameters.values()
        if any(one.name == "skip_output_reshape" for one in given):
            plain = [one for one in given if one.kind is one.POSITIONAL_OR_KEYWORD]
            found[name] = [[one.name, one.default is one.empty, _plain(one.default)] for one in plain]
    return found


def _plain(default):
    return None if default is inspect.Parameter.empty else default


def patcher(model=None):
    """Return ComfyUI's patcher of a model."""
    return ModelPatcher(model or torch.nn.Module(), CPU, CPU)


def functions():
    """Call every function with and without the override; return the greatest difference of each."""
    patched = attnplug_comfyui.patch(patcher())
    options = patched.model_options["transformer_options"]
    masks = {
        "none": None,
        "two axes": torch.randn(7, 5),
        "three axes": torch.randn(2, 7, 5),
        "four axes": torch.randn(2, 4, 7, 5),
    }
    differences, calls = {}, 0
    for name in sorted(attention.REGISTERED_ATTENTION_FUNCTIONS):
        function = attention.REGISTERED_ATTENTION_FUNCTIONS[name]
        for kind, mask in masks.items():
            for skip in (False, True):
                for skip_output in (False, True):
                    q, k, v = (torch.randn(2, 4, tokens, 16) for tokens in (7, 5, 5))
                    if not skip:
                        q, k, v = (one.transpose(1, 2).flatten(2) for one in (q, k, v))
                    flags = {"mask": mask, "skip_reshape": skip, "skip_output_reshape": skip_output}
                    expected = function(q, k, v, 4, **flags)
                    found = function(q, k, v, 4, **flags, transformer_options=options)
                    calls += 1
                    assert found.shape == expected.shape, (name, kind, skip, skip_output)
                    difference = (found - expected).abs().max().item()
                    differences[name] = max(differences.get(name, 0.0), difference)
    counted = {one.replaced: one.calls for one in attnplug_comfyui.report(patched) if one.backend == "torch/sdpa"}
    assert sum(counted.values()) == calls
    return {"differences": differences, "counted": counted}


def booleans():
    """Return how far boolean masks are from ComfyUI's own attention_pytorch."""
    options = attnplug_comfyui.patch(patcher()).model_options["transformer_options"]
    q, k, v = (torch.randn(2, tokens, 64) for tokens in (7, 5, 5))
    most = 0.0
    for axes in ((7, 5), (2, 7, 5), (2, 1, 7, 5), (2, 4, 7, 5)):
        mask = torch.rand(axes) > 0.2
        mask[..., 0] = True
        expected = attention.attention_pytorch(q, k, v, 4, mask)
        found = attention.attention_pytorch(q, k, v, 4, mask, transformer_options=options)
        most = max(most, (found - expected).abs().max().item())
    return most


def precision():
    """Return how far scores in float32 of halves are from those of ComfyUI's function that computes them."""
    patched = attnplug_comfyui.patch(patcher())
    q, k, v = (torch.randn(2, tokens, 64).half() for tokens in (7, 5, 5))
    flags = {"attn_precision": torch.float32, "transformer_options": patched.model_options["transformer_options"]}
    found = attention.attention_split(q, k, v, 4, **flags)
    expected = attention.attention_split(q.float(), k.float(), v.float(), 4)
    (route,) = attnplug_comfyui.report(patched)
    assert (route.dtype, found.dtype) == ("float32", torch.float16)
    return (found - expected).abs().max().item()


def keywords():
    """Return how far grouped heads with a scale, in containers, are from ComfyUI's own; None where it has none."""
    if not hasattr(attention, "AttentionTensorContainer"):
        return None
    options = attnplug_comfyui.patch(patcher()).model_options["transformer_options"]
    q, k, v = torch.randn(2, 7, 64), torch.randn(2, 5, 32), torch.randn(2, 5, 32)
    flags = {"enable_gqa": True, "scale": 0.3, "low_precision_attention": False}
    expected = attention.attention_pytorch(q, k, v, 4, **flags)
    containers = [attention.AttentionTensorContainer(one) for one in (q, k, v)]
    found = attention.attention_pytorch(*containers, 4, **flags, transformer_options=options)
    assert all(one.tensor is None for one in containers)
    return (found - expected).abs().max().item()


def flux():
    """Return a tiny Flux, and its inputs."""
    known = {"txt_ids_dims": []} if "txt_ids_dims" in FluxParams.__dataclass_fields__ else {}  # newer versions
    model = Flux(
        in_channels=4, out_channels=4, vec_in_dim=8, context_in_dim=16, hidden_size=64, mlp_ratio=2.0, num_heads=2,
        depth=2, depth_single_blocks=2, axes_dim=[8, 12, 12], theta=10000, patch_size=2, qkv_bias=True,
        guidance_embed=False, **known, **OPERATIONS,
    )  # fmt: skip
    given = {"x": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([0.5]), "context": torch.randn(1, 6, 16)}
    return model, {**given, "y": torch.randn(1, 8)}


def wan():
    """Return a tiny Wan, and its inputs."""
    model = WanModel(
        text_len=8, in_dim=4, dim=64, ffn_dim=64, freq_dim=16, text_dim=16, out_dim=4, num_heads=2, num_layers=2,
        **OPERATIONS,
    )  # fmt: skip
    given = {"x": torch.randn(1, 4, 2, 8, 8), "timestep": torch.tensor([500.0])}
    return model, {**given, "context": torch.randn(1, 8, 16)}


def unet():
    """Return a tiny UNet of Stable Diffusion, whose scores are requested in float32, and its inputs."""
    model = UNetModel(
        image_size=8, in_channels=4, model_channels=32, out_channels=4, num_res_blocks=[1, 1], channel_mult=(1, 2),
        num_heads=2, use_spatial_transformer=True, transformer_depth=[1, 1], transformer_depth_output=[1, 1, 1, 1],
        transformer_depth_middle=1, context_dim=16, attn_precision=torch.float32, **OPERATIONS,
    )  # fmt: skip
    given = {"x": torch.randn(1, 4, 8, 8), "timesteps": torch.tensor([500.0]), "context": torch.randn(1, 6, 16)}
    return model, given


def models():
    """Run models with several options in turn; return what each counted, and how far its output is."""
    torch.manual_seed(0)
    made = {"flux": flux(), "wan": wan(), "unet": unet()}
    for model, _ in made.values():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
    bases = {name: patcher(model) for name, (model, _) in made.items()}
    patched = {
        "flux": attnplug_comfyui.patch(bases["flux"]),
        "wan": attnplug_comfyui.patch(bases["wan"], "torch/sdpa"),
        "unet": attnplug_comfyui.patch(bases["unet"], "blocksparse", fallback=True),
    }
    plain = {name: run(*made[name], bases[name]) for name in made}
    results = {name: run(*made[name], patched[name]) for name in made}
    for name, base in bases.items():  # the unpatched model runs ComfyUI's function, whatever ran before
        assert torch.equal(run(*made[name], base), plain[name])
        assert base.model_options["transformer_options"] == {}
        assert "optimized_attention_override" in patched[name].clone().model_options["transformer_options"]
    return {
        name: {
            "difference": (results[name] - plain[name]).abs().max().item() / plain[name].abs().max().item(),
            "routes": [[one.replaced, one.backend, one.calls] for one in attnplug_comfyui.report(patched[name])],
        }
        for name in made
    }


def run(model, given, patched):
    """Return what a model computes with the options of a patcher."""
    options = patched.clone().model_options["transformer_options"]
    with torch.inference_mode():
        return model(**given, transformer_options=options)


def setter():
    """Return whether ComfyUI's own setter and ours use the same key."""
    if not hasattr(ModelPatcher, "set_model_optimized_attention"):
        return None
    model = patcher()
    model.set_model_optimized_attention(attention.attention_pytorch)
    return list(model.model_options["transformer_options"])


if __name__ == "__main__":
    torch.manual_seed(0)
    found = {
        "version": __version__,
        "optimized": attention.optimized_attention.__name__,
        "signatures": signatures(),
        "functions": functions(),
        "booleans": booleans(),
        "precision": precision(),
        "keywords": keywords(),
        "models": models(),
        "setter": setter(),
    }
    sys.stdout.write(f"FOUND {json.dumps(found)}\n")
