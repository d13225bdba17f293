"""What an engine counts, and the times of a request."""

from __future__ import annotations

from attrs import frozen


@frozen
class EngineStats:
    """
    The counters of an engine.

    Attributes:
        steps: Forward passes of the model.
        replayed_steps: Those of them that were replays of captured decode steps.
        steps_ahead: Those of them that were launched before the tokens of the previous step were on the host.
        preemptions: Times that a request released its blocks for an older one, to be recomputed later.
        blocks_in_use: Blocks that requests own now.
    """

    steps: int
    replayed_steps: int
    steps_ahead: int
    preemptions: int
    blocks_in_use: int


@frozen
class RequestMetrics:
    """
    The times and counts of one request so far. Times are in seconds of host time, from the monotonic clock.

    A token counts from the moment that its step has ended and its value is on the host.

    Attributes:
        queue_time: From the submission to the first step that was scheduled with it; None while it waits for that.
        time_to_first_token: From the submission to the first token (TTFT); None without a token.
        inter_token_latencies: Between each token and the one before it; a preemption counts as well.
        total_time: From the submission to the last token; None without a token.
        num_prompt_tokens: Tokens of the prompt.
        num_cached_tokens: Those of them whose keys and values its last admission found by prefix caching.
        num_new_tokens: Generated tokens.
        num_preemptions: Times that it released its blocks, and was recomputed.
    """

    queue_time: float | None
    time_to_first_token: float | None
    inter_token_latencies: tuple[float, ...]
    total_time: float | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_tokens: int
    num_preemptions: int

    @property
    def mean_inter_token_latency(self) -> float | None:
        """The mean of `inter_token_latencies`, in seconds (TPOT); None with fewer than two tokens."""
        latencies = self.inter_token_latencies
        return sum(latencies) / len(latencies) if latencies else None
