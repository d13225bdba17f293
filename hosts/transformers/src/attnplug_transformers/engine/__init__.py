"""
A paged engine over unmodified transformers models: requests join and leave its batch at any step.

    from attnplug_transformers.engine import Engine, SamplingParams

    with Engine(model) as engine:
        engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=20)

        for output in engine.stream([[1, 2, 3]], sampling=SamplingParams(temperature=0.8, seed=1, max_new_tokens=20)):
            output.tokens

        request = engine.submit([1, 2, 3], max_new_tokens=20)
        while engine.has_work:
            engine.step()
        request.new_tokens
"""

from __future__ import annotations

from attnplug_transformers.engine.engine import Engine
from attnplug_transformers.engine.logprobs import TokenLogprobs
from attnplug_transformers.engine.metrics import EngineStats, RequestMetrics
from attnplug_transformers.engine.params import Sampling, SamplingParams
from attnplug_transformers.engine.request import Request
from attnplug_transformers.engine.streaming import StreamOutput

__all__ = [
    "Engine",
    "EngineStats",
    "Request",
    "RequestMetrics",
    "Sampling",
    "SamplingParams",
    "StreamOutput",
    "TokenLogprobs",
]
