"""A solution of FlashInfer Trace as a backend, in the process that the conformance kit judges it in."""

from __future__ import annotations

import importlib
import json
import sys
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from attnplug.batching import pages_of
from attnplug.contract import AttentionImpl, Backend, Metadata, MetadataBuilder
from attnplug.errors import PluginContractError
from attnplug.ops import write_kv, write_pages
from attnplug_kit.trace.solution import DEFINITION, SOLUTION, Solution, read_definition

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from attnplug_kit.trace.definition import Definition


@frozen(eq=False, kw_only=True)
class SolutionMetadata(Metadata):
    """
    The offsets and pages of a batch.

    Attributes:
        indices: The index tensors, int32, by the name of the definition's input.
    """

    indices: Mapping[str, Tensor]


class SolutionBuilder(MetadataBuilder):
    """Makes the index tensors that definitions have as inputs, from CPU lengths: the device is not waited for."""

    def plan_batch(self, batch: Any, split: Any, *, fast: bool, graph: Any) -> Mapping[str, Any]:
        """Return the offsets and pages of a batch."""
        del split, fast, graph
        size = self.agreement.block_size
        if size is None:
            return {"indices": {"qo_indptr": batch.query_start_loc, "kv_indptr": batch.key_start_loc}}
        if all(impl.definition.is_decode for impl in self.impls if isinstance(impl, SolutionImpl)):
            return {"indices": _decodes_of(batch, size)}
        pages = pages_of(batch, size)
        found = {"kv_indptr": pages.indptr, "kv_indices": pages.indices, "kv_last_page_len": pages.last_page_len}
        return {"indices": {"qo_indptr": batch.query_start_loc, **found}}


def _decodes_of(batch: Any, size: int) -> dict[str, Tensor]:
    """Return each query token as a decode over the keys up to itself, so that a decode kernel serves prefills too."""
    query_lens = batch.query_start_loc_cpu.diff()
    request = torch.arange(len(query_lens)).repeat_interleave(query_lens)
    behind = batch.query_start_loc_cpu[1:][request] - torch.arange(len(request))
    keys = batch.seq_lens_cpu[request] - behind + 1
    counts = (keys + size - 1) // size
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    token = torch.arange(len(request)).repeat_interleave(counts)
    column = torch.arange(len(token)) - indptr[token]
    table, last = batch.block_table, keys - (counts - 1) * size
    indices = table[request[token].to(table.device), column.to(table.device)]
    found = {"kv_indptr": indptr, "kv_indices": indices, "kv_last_page_len": last}
    return {name: each.int().to(table.device) for name, each in found.items()}


class SolutionImpl(AttentionImpl):
    """One layer: new K/V are written, then the solution computes the whole batch."""

    cache_write = "forward"
    lse_includes_sink = True
    definition: Definition
    solution: Solution
    function: Callable[..., Any]

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Any,
        metadata: Any,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Attend, see `AttentionImpl.run`."""
        batch = metadata.batch
        if kv_cache is not None and key is not None:
            if value is None:
                write_pages(key, kv_cache.k, batch.slot_mapping)
            else:
                write_kv(key, value, kv_cache.k, kv_cache.v, batch.slot_mapping)
        tokens = batch.num_actual_tokens
        inputs = self._inputs(query[:tokens], key, value, kv_cache) | dict(metadata.indices)
        results = self._call({name: inputs[name] for name in self.definition.inputs}, query[:tokens])
        output[:tokens] = results["output"].flatten(1)
        if lse is not None:
            lse[:tokens] = results["lse"] * log(2.0)  # the format's is to base 2

    def _inputs(self, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Any) -> dict[str, Any]:
        """Return the inputs but for indices, contiguous: shapes alone are in a definition."""
        # A head without a sink has a large negative one, see `Layer.sinks`.
        none = torch.full((self.num_q_heads,), -1e4, device=query.device)
        found: dict[str, Any] = {"sinks": none if self.layer.sinks is None else self.layer.sinks.float()}
        if self.agreement.requirements.latent:
            for names, rows in ((("q_nope", "q_pe"), query), (("ckv_cache", "kpe_cache"), kv_cache.k[:, :, 0])):
                found |= zip(names, rows.tensor_split([self.head_size_v], -1), strict=True)
        elif kv_cache is not None:
            found |= {"q": query, "k_cache": kv_cache.k, "v_cache": kv_cache.v}
        else:
            found |= {"q": query, "k": key, "v": value}
        scalars = {"sm_scale": self.scale, "logits_soft_cap": self.logits_soft_cap or 0.0}
        return scalars | {name: tensor.contiguous() for name, tensor in found.items()}

    def _call(self, inputs: Mapping[str, Any], query: Tensor) -> dict[str, Tensor]:
        """Call the solution with inputs, and outputs where it takes those, in the order of the definition."""
        names = tuple(self.definition.outputs)
        wanted = {
            "output": ((*query.shape[:2], self.head_size_v), query.dtype),
            "lse": (query.shape[:2], torch.float32),
        }
        if self.solution.takes_outputs:
            results: Any = tuple(query.new_empty(wanted[n][0], dtype=wanted[n][1]) for n in names)
            self.function(*inputs.values(), *results)
        else:
            results = self.function(*inputs.values())
        if isinstance(results, torch.Tensor):
            results = (results,)
        if isinstance(results, dict):
            results = tuple(results.get(name) for name in names)
        if not isinstance(results, (tuple, list)) or len(results) != len(names):
            raise PluginContractError(
                f"{self.solution.entry_point} returned {type(results).__name__}",
                f"its definition has the outputs {', '.join(names)}",
                "return them in this order, or set destination_passing_style",
            )
        found = dict(zip(names, results, strict=True))
        for name, each in found.items():
            given = (each.shape, each.dtype) if isinstance(each, torch.Tensor) else type(each).__name__
            if given != wanted[name]:
                raise PluginContractError(
                    f"{self.solution.entry_point} returned {name} as {given}",
                    f"the definition has {wanted[name]}",
                    "return what the definition says",
                )
        return found


def backend_of(folder: Path) -> type[Backend]:
    """
    Return the backend of a solution in a folder, and import its sources: this runs foreign code.

    Args:
        folder: Has the files `DEFINITION` and `SOLUTION`, and the sources.
    """
    made = Solution.from_dict(json.loads((folder / SOLUTION).read_text(encoding="utf-8")))
    definition_ = read_definition(folder / DEFINITION)
    place, name = made.entry_point.split("::")
    sys.path.insert(0, str(folder))  # sources import each other by the names of their files
    module = importlib.import_module(".".join((folder.name, *Path(place).with_suffix("").parts)))

    class Impl(SolutionImpl):
        definition = definition_
        solution = made
        function = staticmethod(getattr(module, name))

    class Made(Backend):
        impl_class = Impl
        builder_class = SolutionBuilder
        metadata_class = SolutionMetadata

    return Made
