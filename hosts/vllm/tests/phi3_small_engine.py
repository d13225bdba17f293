"""Run a Phi-3-small in an engine of vLLM: a specification in JSON as the argument, results in JSON on the last line."""

from __future__ import annotations

import json
import sys


def main() -> None:
    """Generate greedily, and print tokens, logprobs and the backend of each layer."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - workers import this module too

    given = json.loads(sys.argv[1])
    if given["interpreted"]:
        register_for_the_interpreter()
    engine = LLM(**{"skip_tokenizer_init": True, "enforce_eager": True} | given["engine"])
    greedy = SamplingParams(
        temperature=0.0, max_tokens=given["max_tokens"], logprobs=1, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": each} for each in given["prompts"]]
    outputs = [each.outputs[0] for each in engine.generate(prompts, greedy, use_tqdm=False)]
    config = engine.llm_engine.vllm_config.compilation_config
    found = {
        "mode": int(config.mode),  # of compilation
        "tokens": [list(each.token_ids) for each in outputs],
        "logprobs": [
            [at[token].logprob for at, token in zip(each.logprobs, each.token_ids, strict=True)] for each in outputs
        ],
        # Nothing where the layers are in other processes.
        "backends": {
            name: getattr(getattr(layer.impl, "selection", None), "id", None)
            for name, layer in config.static_forward_context.items()
        },
    }
    print(json.dumps(found))  # noqa: T201 - the result


def register_for_the_interpreter() -> None:
    """Register the plugin blocksparse for the CPU, where Triton interprets its kernels."""
    from plugins.blocksparse.tests.conftest import PLUGIN  # noqa: PLC0415 - on request only
    from tests.backends.triton_on_cpu import skip_overflow_checks  # noqa: PLC0415 - likewise

    PLUGIN.configure()
    skip_overflow_checks()


if __name__ == "__main__":
    main()
