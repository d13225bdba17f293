"""The text of a definition's reference: PyTorch code that computes the oracle's attention, and imports nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

# One head at a time: the scores of all heads of a long prefill would not fit into memory in float64.
_ATTEND: Final = '''\
import math

import torch

WINDOW = {window}  # tokens that a token attends to, itself included; None for all


def attend(q, k, v, sm_scale, soft_cap, sinks):
    """Causal attention of one request in float64; its queries are its last tokens. The LSE is to base 2."""
    group = q.shape[1] // k.shape[1]
    rows = torch.arange(q.shape[0], device=q.device)[:, None] + (k.shape[0] - q.shape[0])
    distance = rows - torch.arange(k.shape[0], device=q.device)[None, :]
    hidden = distance < 0
    if WINDOW is not None:
        hidden = hidden | (distance >= WINDOW)
    output = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    lse = q.new_full(q.shape[:2], -math.inf, dtype=torch.float64)
    for head in range(q.shape[1] if len(k) else 0):
        scores = sm_scale * (q[:, head].double() @ k[:, head // group].double().T)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(hidden, -math.inf)
        total = torch.logsumexp(scores, 1)
        if sinks is not None:
            total = torch.logaddexp(total, sinks[head].double())
        weights = torch.exp(scores - total[:, None]).masked_fill(hidden, 0.0)
        output[:, head] = weights @ v[:, head // group].double()
        lse[:, head] = total / math.log(2.0)
    if sinks is not None and not len(k):
        lse[:] = sinks.double() / math.log(2.0)
    return output, lse


def paged(pages, first, last, last_page_len, kv_indices):
    """The rows of one request, from its pages."""
    rows = pages[kv_indices[first:last].long()].flatten(0, 1)
    return rows[: max(0, (last - first - 1) * pages.shape[1] + last_page_len)]


@torch.no_grad()
def run({inputs}):
    output = torch.zeros(*{query}.shape[:2], {value}.shape[-1], dtype={query}.dtype, device={query}.device)
    lse = torch.full({query}.shape[:2], -math.inf, dtype=torch.float32, device={query}.device)
    kv_bounds = kv_indptr.tolist()
    q_bounds = {bounds}
    for request in range(len(kv_bounds) - 1):
        begin, end = q_bounds[request], q_bounds[request + 1]
        first, last = kv_bounds[request], kv_bounds[request + 1]
{gather}
        out, log_sum = attend(queries, keys, values, float(sm_scale), {soft_cap}, {sinks})
        output[begin:end] = out.to(output.dtype)
        lse[begin:end] = log_sum.float()
    return output, lse
'''

_GATHER: Final = {
    "gqa_paged": """\
        length = int(kv_last_page_len[request])
        queries = q[begin:end]
        keys = paged(k_cache, first, last, length, kv_indices)
        values = paged(v_cache, first, last, length, kv_indices)""",
    "mla_paged": """\
        length = int(kv_last_page_len[request])
        queries = torch.cat([q_nope[begin:end], q_pe[begin:end]], -1)
        latents = paged(ckv_cache, first, last, length, kv_indices)[:, None]
        rotary = paged(kpe_cache, first, last, length, kv_indices)[:, None]
        keys, values = torch.cat([latents, rotary], -1), latents""",
    "gqa_ragged": """\
        queries, keys, values = q[begin:end], k[first:last], v[first:last]""",
}

_NAMES: Final = {"gqa_paged": ("q", "v_cache"), "mla_paged": ("q_nope", "ckv_cache"), "gqa_ragged": ("q", "v")}


def reference_text(op_type: str, inputs: Sequence[str], window: int | None) -> str:
    """
    Return the code of a definition's reference, with a function ``run``.

    Args:
        op_type: gqa_paged, mla_paged or gqa_ragged.
        inputs: The names of the definition's inputs, which are the parameters of ``run`` in this order.
        window: Tokens that a token attends to, itself included; None for all.
    """
    query, value = _NAMES[op_type]
    text = _ATTEND.format(
        window=window,
        inputs=", ".join(inputs),
        query=query,
        value=value,
        bounds="qo_indptr.tolist()" if "qo_indptr" in inputs else "range(len(kv_bounds))",
        gather=_GATHER[op_type],
        soft_cap="float(logits_soft_cap) or None" if "logits_soft_cap" in inputs else "None",
        sinks="sinks" if "sinks" in inputs else "None",
    )
    if op_type == "gqa_ragged":  # which has no pages
        before, _, after = text.partition("def paged(")
        text = before + after[after.index("@torch.no_grad()") :]
    return text
