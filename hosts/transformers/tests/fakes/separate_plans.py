"""A fake plugin: torch's own kernels, with a separate plan for each layer."""

from __future__ import annotations

from attnplug.contract.hooks import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl

MANIFEST = """\
api = "1.0"
backend = { name = "separate", summary = "each layer plans by itself" }
[supports]
device_type = "cpu"
dtype = "float32"
head_size = { min = 1 }
block_size = [8]
kv_layout = ["HND"]
features = ["paged", "sliding_window", "logits_soft_cap", "sinks"]
[variants.sdpa]
"""


class SeparateImpl(TorchImpl):
    @property
    def plan_key(self):
        return self.layer.name


class SeparateBackend(TorchBackend):
    impl_class = SeparateImpl


@hookimpl
def attnplug_backend(variant, agreement):
    return SeparateBackend
