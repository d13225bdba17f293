"""Calibrate a model in an engine of vLLM, or run it on an int8 KV cache: a specification in JSON as the argument."""

from __future__ import annotations

import json
import sys


def observed(worker):
    """Return the value scales of a worker's KV heads: what a user runs on each rank."""
    from attnplug_int8_ixformer.value_scales import ValueScales  # noqa: PLC0415 - the user's code, not the host's
    from attnplug_vllm import implementations  # noqa: PLC0415 - likewise

    return ValueScales.observed(implementations(worker).values())


def main() -> None:
    """Generate greedily, and print tokens, logprobs, blocks, and the backend and memory of each layer."""
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - as in the other programs

    from attnplug_int8_ixformer.value_scales import ValueScales  # noqa: PLC0415 - likewise
    from attnplug_vllm import implementations  # noqa: PLC0415 - likewise
    from plugins.int8_ixformer.tests.conftest import PLUGIN  # noqa: PLC0415 - likewise
    from tests.backends.triton_on_cpu import speed_up_interpreter  # noqa: PLC0415 - likewise

    given = json.loads(sys.argv[1])
    if given["interpreted"]:
        PLUGIN.configure()
        speed_up_interpreter()
    engine = LLM(skip_tokenizer_init=True, enforce_eager=True, **given["engine"])
    greedy = SamplingParams(
        temperature=0.0, max_tokens=given["max_tokens"], logprobs=5, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": each} for each in given["prompts"]]
    outputs = [each.outputs[0] for each in engine.generate(prompts, greedy, use_tqdm=False)]

    if given["save"]:
        ValueScales.of_ranks(engine.collective_rpc(observed)).save(given["save"])
    if engine.llm_engine.vllm_config.parallel_config.tensor_parallel_size > 1:
        print(json.dumps({}))  # noqa: T201 - layers are in other processes
        return
    (impls,) = engine.collective_rpc(implementations)
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context
    found = {
        "tokens": [list(each.token_ids) for each in outputs],
        "logprobs": [[{token: one.logprob for token, one in at.items()} for at in each.logprobs] for each in outputs],
        "backends": {name: impl.backend.id for name, impl in impls.items()},
        "dtypes": sorted({str(layer.kv_cache.dtype) for layer in layers.values()}),
        "bytes_per_block": sorted(
            {layer.kv_cache[0].numel() * layer.kv_cache.element_size() for layer in layers.values()}
        ),
        "num_blocks": engine.llm_engine.vllm_config.cache_config.num_gpu_blocks,
    }
    print(json.dumps(found))  # noqa: T201 - the result


if __name__ == "__main__":
    main()
