"""
A paged engine over unmodified transformers models: requests join and leave its batch at any step.

    from attnplug_transformers.engine import Engine, Sampling

    with Engine(model) as engine:
        engine.generate([[1, 2, 3], [4, 5]], max_new_tokens=20)

        request = engine.submit([1, 2, 3], max_new_tokens=20, sampling=Sampling(temperature=0.8, seed=1))
        while engine.has_work:
            engine.step()
        request.new_tokens
"""

from __future__ import annotations

from attnplug_transformers.engine.engine import Engine, EngineStats
from attnplug_transformers.engine.request import Request
from attnplug_transformers.engine.sampling import Sampling

__all__ = ["Engine", "EngineStats", "Request", "Sampling"]
