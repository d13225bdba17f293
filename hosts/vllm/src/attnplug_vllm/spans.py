"""The bidirectional spans of a step (mm_prefix): an image's tokens attend to each other, in both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve, frozen

from attnplug.contract import upload
from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug import Requirements
    from attnplug.contract import Batch

_CLAMPED: Final = "mm_prefix_clamp_sliding_window"
"""The name in vLLM's layers of spans that end where the window does, as in Gemma 4."""


@frozen
class LayerSpans:
    """
    How layers have spans.

    Attributes:
        window: Tokens that a token attends to, where a window hides the rest of a span too; None for whole spans.
    """

    window: int | None

    def of(self, batch: Batch, common: Any) -> Batch:
        """
        Return the batch with the span of each query token; the same where no token is in one.

        Args:
            batch: The batch, without spans.
            common: vLLM's `CommonAttentionMetadata`, with the first and the last position of each span of a request.
        """
        ranges = getattr(common, "mm_req_doc_ranges", None)
        if not ranges or not any(ranges.values()):
            return batch
        starts: list[int] = common.query_start_loc_cpu[: batch.num_reqs + 1].tolist()
        # Bounds of prompts are exact, and sampled tokens are in no span.
        lens = common.seq_lens.cpu() if batch.seq_lens_cpu is None else batch.seq_lens_cpu
        found = torch.full((batch.num_actual_tokens, 2), -1, dtype=torch.int32)
        for request, spans in ranges.items():
            if request >= batch.num_reqs:
                continue
            shift = int(lens[request]) - starts[request + 1]  # from rows to positions
            for low, high in spans:
                first = max(low - shift, starts[request])
                last = min(high - shift, starts[request + 1] - 1)
                if low < high and first <= last:
                    found[first : last + 1, 0] = low
                    found[first : last + 1, 1] = high
                    if self.window is not None:
                        oldest = torch.arange(first, last + 1, dtype=torch.int32) + (shift + 1 - self.window)
                        found[first : last + 1, 0].clamp_(min=oldest)
        if not bool((found >= 0).any()):
            return batch
        return evolve(batch, mm_prefix_range=upload(found, batch.seq_lens.device), mm_prefix_range_cpu=found)


def spans_of(requirements: Requirements, layers: Sequence[Any], config: Any) -> LayerSpans | None:
    """
    Return how layers have spans; None where they do not.

    A model some of whose layers end spans at their window has spans in these alone: vLLM takes them from the metadata
    of the others, before each forward.

    Args:
        requirements: What the layers request.
        layers: vLLM's layers.
        config: vLLM's configuration, with all layers of the model.

    Raises:
        NotNegotiatedError: A step is cut into microbatches.
    """
    if not requirements.mm_prefix:
        return None
    if getattr(config.parallel_config, "use_ubatching", False):
        raise NotNegotiatedError(
            "microbatches were configured in vLLM, for a model with bidirectional spans (mm_prefix)",
            "vLLM leaves the spans out of the metadata of a microbatch",
            "leave --enable-dbo out",
        )
    if any(getattr(layer, _CLAMPED, False) for layer in layers):
        return LayerSpans(requirements.sliding_window)
    every = config.compilation_config.static_forward_context.values()
    return None if any(getattr(layer, _CLAMPED, False) for layer in every) else LayerSpans(None)
