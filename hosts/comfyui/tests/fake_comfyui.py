"""
A small ComfyUI: attention functions with the signatures of a version, behind a wrapper that calls an override.

It is written for these tests. Every call is checked against the published signature before anything runs.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType, SimpleNamespace

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from hosts.comfyui.tests.signatures import VERSIONS

KEY = "optimized_attention_override"
OF_THE_WRAPPER = {"transformer_options", "_inside_attn_wrapper"}


def signature_of(parameters):
    """Return the signature of published parameters."""
    named = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if default is ...
        else inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in parameters
    ]
    return inspect.Signature([*named, inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)])


class Container:
    """What newer versions pass a tensor in: it is taken out once."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        """Return the tensor, and forget it."""
        assert self.tensor is not None, "the container is empty"
        tensor, self.tensor = self.tensor, None
        return tensor


class FakePatcher:
    """A model, with options that a clone copies."""

    def __init__(self, comfyui, options=None):
        self.comfyui = comfyui
        self.model_options = options if options is not None else {"transformer_options": {}}

    def clone(self):
        """Return a copy: dicts and lists are copied deeply, what they hold is shared."""
        return FakePatcher(self.comfyui, _copied(self.model_options))

    def attend(self, *args, function=None, **kwargs):
        """Call ComfyUI's function as a layer of this model does."""
        function = function or self.comfyui.optimized_attention
        return function(*args, transformer_options=self.model_options["transformer_options"], **kwargs)


def _copied(value):
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return list(value) if isinstance(value, list) else value


class FakeComfyUI:
    """
    The modules of one version.

    `calls` has the names of the functions that ran, and `wrapped` those that the wrapper was passed for.
    """

    def __init__(self, name):
        self.name, self.version = name, VERSIONS[name]
        self.calls, self.wrapped = [], []
        self.forced = None
        self.functions = {
            f"attention{'' if one[0].isdigit() else '_'}{one}": parameters
            for one, parameters in self.version.functions.items()
        }
        for function, parameters in self.functions.items():
            setattr(self, function, self._wrapped(function, signature_of(parameters)))
        self.optimized_attention = self.attention_pytorch

    def install(self, monkeypatch):
        """Put the modules where an import finds them."""
        attention = ModuleType("comfy.ldm.modules.attention")
        attention.get_attn_precision = self.get_attn_precision
        attention.optimized_attention = self.optimized_attention
        for name in ("comfy", "comfy.ldm", "comfy.ldm.modules"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        monkeypatch.setitem(sys.modules, attention.__name__, attention)

    def get_attn_precision(self, attn_precision, current_dtype):
        """Return what the command line makes of a requested precision."""
        return self.forced.get(current_dtype, attn_precision) if self.forced is not None else attn_precision

    def model(self, **options):
        """Return a model that was just loaded."""
        return FakePatcher(self, {"transformer_options": options})

    def _wrapped(self, name, signature):
        def function(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            extra = bound.arguments.pop("kwargs")
            unknown = extra.keys() - OF_THE_WRAPPER - self.version.keywords
            assert not unknown, f"{name} of ComfyUI {self.name} reads no {sorted(unknown)}"
            assert extra.get("_inside_attn_wrapper") is True, "the wrapper was not passed"
            self.calls.append(name)
            return plain(*bound.arguments.values(), **{key: extra[key] for key in extra.keys() - OF_THE_WRAPPER})

        function.__name__ = name
        function.__signature__ = signature

        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            if self.version.has_preference:
                kwargs.pop("preferred_attention", None)
            if self.version.has_containers:
                args = tuple(one.take() if isinstance(one, Container) else one for one in args)
            if "_inside_attn_wrapper" in kwargs:
                return function(*args, **kwargs)
            self.wrapped.append(name)
            options = kwargs.get("transformer_options")
            kwargs["_inside_attn_wrapper"] = True
            if options is not None and KEY in options:
                assert not hasattr(options[KEY], "container_function")  # or it would be called with containers
                signature.bind(*args, **kwargs)
                return options[KEY](function, *args, **kwargs)
            return function(*args, **kwargs)

        return wrapper


def plain(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **more):
    """Return what the functions of ComfyUI compute, from torch's function: the reference of the tests, in q's dtype."""
    if not skip_reshape:
        size = q.shape[-1] // heads
        q, k, v = (one.unflatten(2, (-1, size)).transpose(1, 2) for one in (q, k, v))
    if mask is not None:
        mask = mask[None, None] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
    options = SimpleNamespace(**more)
    scale, gqa = getattr(options, "scale", None), getattr(options, "enable_gqa", False)
    if attn_precision == torch.float32:
        dtype, (q, k, v) = q.dtype, (q.float(), k.float(), v.float())
        output = sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa).to(dtype)
    else:
        output = sdpa(q, k, v, attn_mask=mask, scale=scale, enable_gqa=gqa)
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


def in_double(q, k, v, heads, **kwargs):
    """
    Return the same by a softmax that is written out, in float64, without torch's function.

    A query that attends to nothing has output 0.
    """
    skip, skip_output = kwargs.get("skip_reshape", False), kwargs.get("skip_output_reshape", False)
    q, k, v = q.double(), k.double(), v.double()
    if not skip:
        size = q.shape[-1] // heads
        q, k, v = (one.reshape(*one.shape[:2], -1, size).permute(0, 2, 1, 3) for one in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scale = kwargs.get("scale")
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    mask = kwargs.get("mask")
    if mask is not None:
        mask = mask.reshape(mask.shape[0], 1, *mask.shape[1:]) if mask.ndim == 3 else mask
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    weights = torch.nan_to_num(scores.softmax(-1))
    output = torch.einsum("bhqk,bhkd->bhqd", weights, v)
    return output if skip_output else output.permute(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)
