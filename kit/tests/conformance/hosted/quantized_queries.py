"""A correct backend whose host quantizes queries to the dtype of the cache."""

from __future__ import annotations

from attnplug.contract import hookimpl
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class QuantizedImpl(TorchImpl):
    query_quantization = "host"
    static_scales = frozenset("qkv")

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if self._codec is not None:
            query = (query.float() * self._of_queries()).to(output.dtype)
        super().run(query, key, value, kv_cache, metadata, output, lse)

    def _of_queries(self):
        scale = self.layer.q_scale_tensor
        return scale if scale.numel() == 1 else scale.repeat_interleave(self.num_queries_per_kv).unsqueeze(1)


class QuantizedBackend(TorchBackend):
    impl_class = QuantizedImpl


@hookimpl
def attnplug_backend():
    return QuantizedBackend
