"""
Steps of SGLang's model runner, made by hand, with a float64 reference: `sglang_host.py` compares backends on it.

What runs without a reference is that of ``attnplug bench --host sglang``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug_kit.oracle import attend
from attnplug_sglang import bench
from attnplug_sglang.bench import Graph, Variant, make_runner

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Graph", "Rig", "Variant", "make_runner"]


class Rig(bench.Rig):
    """Requests on a runner, with a reference of their attention."""

    def expected(self, requests: list[int], lens: list[int], data: Any) -> list[Tensor]:
        """Return the float64 attention of each layer, and take the keys and values of the step over."""
        outputs: list[list[Tensor]] = [[] for _ in self.layers]
        sizes = [(layer.qk_head_dim, layer.qk_head_dim, layer.v_head_dim) for layer in self.layers]
        dtype = self.runner.token_to_kv_pool.dtype  # in which the pool keeps them
        start = 0
        for request, count in zip(requests, lens, strict=True):
            known = self.requests[request]
            for i in range(len(self.layers)):
                q, k, v = (
                    t[start : start + count].view(count, -1, size) for t, size in zip(data[i], sizes[i], strict=True)
                )
                keys = torch.cat([known["kv"][i][0], k.to(dtype).double()])
                values = torch.cat([known["kv"][i][1], v.to(dtype).double()])
                outputs[i].append(self._attend(i, q.double(), keys, values))
                known["kv"][i] = (keys, values)
            known["length"] += count
            start += count
        return [torch.cat(each) for each in outputs]

    def _attend(self, index: int, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        variant = self.variant
        with self.device:  # the reference makes its positions on the default device
            return attend(
                q,
                keys,
                values,
                scale=self.layers[index].scaling,
                window=(-1, -1) if variant.window is None else (variant.window, 0),
                logits_soft_cap=variant.cap or None,
                sinks=self.sinks[index],
            ).output.flatten(1)
