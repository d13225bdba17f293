"""
An engine of SGLang on attnplug, in a process for itself: ``python run.py JOB RESULT``.

JOB is a JSON file: ``options`` of `sgl.Engine`, and ``rounds``, lists of prompts that are generated together, each with
``max_new_tokens``. RESULT gets the tokens of each prompt, their logprobs, and how many of its tokens were in the radix
cache.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[4]))

from hosts.sglang.tests import stand_ins

if torch.cuda.is_available():
    stand_ins.install_for_latents()
else:
    stand_ins.install_for_engines()

from attnplug_sglang import latent
from attnplug_sglang.registration import register

register()
_method_of = latent.method_of


def _logged(attn: object, forward_batch: object) -> object:
    """Choose as the host does, and have the choice in the log of the engine."""
    found = _method_of(attn, forward_batch)
    print(f"the form is {found.name}", flush=True)  # noqa: T201 - into the log
    return found


latent.method_of = _logged


def main(job: Path, result: Path) -> None:
    """Run a job."""
    import sglang  # noqa: PLC0415 - not in the processes of the engine

    asked = json.loads(job.read_text())
    engine = sglang.Engine(**asked["options"])
    try:
        rounds = [_generate(engine, **each) for each in asked["rounds"]]
    finally:
        engine.shutdown()
    result.write_text(json.dumps(rounds))


def _generate(engine: object, prompts: list[list[int]], max_new_tokens: int) -> list[dict[str, object]]:
    sampling = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
    found = engine.generate(input_ids=prompts, sampling_params=sampling, return_logprob=True)  # type: ignore[attr-defined]
    return [
        {
            "tokens": one["output_ids"],
            "logprobs": [each[0] for each in one["meta_info"]["output_token_logprobs"]],
            "cached": one["meta_info"].get("cached_tokens", 0),
        }
        for one in found
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
