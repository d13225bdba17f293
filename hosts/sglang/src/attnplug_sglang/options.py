"""SGLang's options: the limits that follow from them, and those that are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug import Limits
from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Iterator


def options_of(runner: Any) -> Any:
    """
    Return the options of a model runner as SGLang has settled them.

    Since 0.5.20 SGLang keeps what it settles apart from what was passed: the fields of its arguments have the latter.
    """
    from sglang.srt.arg_groups.overrides import resolved_view  # noqa: PLC0415 - imports SGLang's arguments

    return resolved_view(runner.server_args)


def limits_of(runner: Any, num_blocks: int) -> Limits:
    """
    Return the most that steps of a model runner need: a chunk of prompts, and all running requests with drafts.

    Args:
        runner: SGLang's model runner.
        num_blocks: Pages of the largest pool.
    """
    rows, longest = runner.req_to_token_pool.req_to_token.shape
    options = options_of(runner)
    drafts = max(1, getattr(options, "speculative_num_draft_tokens", None) or 1)
    chunk = options.chunked_prefill_size
    if chunk is None or chunk <= 0:
        chunk = max(options.max_prefill_tokens, longest)
    return Limits(
        max_num_reqs=max(rows, 1),
        max_num_tokens=chunk + rows * drafts + runner.page_size,
        max_seq_len=longest + drafts,
        num_blocks=num_blocks,
    )


def check_options(runner: Any) -> None:
    """
    Refuse what SGLang is started with and is not served.

    Raises:
        NotNegotiatedError: It is started with such an option, or the model needs what no backend here has.
    """
    for problem, expected, fix in _problems(runner, options_of(runner)):
        raise NotNegotiatedError(problem, expected, fix)


def _problems(runner: Any, options: Any) -> Iterator[tuple[str, str, str]]:
    if getattr(options, "enable_unified_memory", False):
        yield (
            "SGLang was started with a unified memory pool",
            "its slots are translated at each step, which is not served",
            "leave --enable-unified-memory out",
        )
    if getattr(options, "dcp_size", 1) > 1:
        yield "SGLang was started with decode context parallelism", "it is not served here", "leave --dcp-size out"
    if getattr(options, "enable_prefill_cp", False) or getattr(options, "attn_cp_size", 1) > 1:
        yield (
            "SGLang was started with prefill context parallelism",
            "each rank has a part of the queries then, which is not served here",
            "leave --enable-prefill-cp and --attn-cp-size out",
        )
    # SGLang's own models give this mask to its Triton backend, and leave it out for any other.
    if hasattr(runner.model, "prepare_attn_masks") and getattr(_config(runner), "is_multimodal", False):
        yield (
            f"{type(runner.model).__name__} has images, whose tokens attend to later tokens of the same image",
            "SGLang passes the mask for that to its Triton backend alone",
            "serve the model with --attention-backend triton, or text alone without --enable-multimodal",
        )


def _config(runner: Any) -> Any:
    return getattr(runner, "model_config", None)
