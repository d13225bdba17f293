"""
Engines of vLLM, each in its own process. A line of stdin is a specification in JSON, one of stdout has its results.
A specification with arguments has them parsed as `vllm serve` does, and nothing runs.

Importing vLLM takes longer than a tiny engine does: it is imported once, and each engine runs in a fork.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[4]


def main():
    """Serve until stdin ends."""
    # Here, once: each fork would import them again. attnplug's kit may collect this module where vLLM is not.
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - see above
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - likewise
    from vllm.platforms import current_platform  # noqa: PLC0415 - likewise

    del LLM, SamplingParams, AsyncEngineArgs
    if current_platform.is_cpu():
        importlib.import_module("vllm.v1.worker.cpu_worker")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no result
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            result = _run_in_fork(json.loads(line), log)
        print(json.dumps(result), file=answers, flush=True)


def _run_in_fork(given, log):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        _run_here(given, write, log)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    log.seek(0)
    printed = log.read()
    return (json.loads(text) if text else {"error": printed[-8000:]}) | {"log": printed}


def _run_here(given, write, log):
    """Run one engine, and end this process, whatever happens."""
    status = 1
    try:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        os.environ.update(given["environment"])
        sys.path[:0] = given["path"]
        if given.get("plugin"):
            _configure(given["plugin"])
        os.environ["PYTHONPATH"] = os.pathsep.join([*given["path"], *filter(None, [os.environ.get("PYTHONPATH")])])
        with os.fdopen(write, "w", encoding="utf-8") as pipe:
            json.dump(_parsed(**given) if "arguments" in given else _results(given), pipe)
        status = 0
    except BaseException:  # noqa: BLE001 - it is printed, and the process ends
        traceback.print_exc()
    finally:
        try:
            _save_coverage()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _configure(name):
    """Register a plugin of Triton kernels for the CPU, where its interpreter runs them."""
    sys.path.append(str(ROOT))
    from tests.backends.triton_on_cpu import speed_up_interpreter  # noqa: PLC0415 - on request only

    importlib.import_module(f"plugins.{name}.tests.conftest").PLUGIN.configure()
    speed_up_interpreter()


def _save_coverage():
    """Write what was measured in this fork, which ends without its handlers of an exit."""
    if coverage := sys.modules.get("coverage"):
        for measured in filter(None, [coverage.Coverage.current()]):
            measured.stop()
            measured.save()


def _parsed(arguments, names, **_):
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - see above
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415 - likewise

    parser = FlexibleArgumentParser()
    parser.add_argument("model_tag")
    found = AsyncEngineArgs.add_cli_args(parser).parse_args(arguments)
    return {"parsed": {name: getattr(found, name) for name in names}}


def _results(given):
    from vllm import LLM  # noqa: PLC0415 - see above

    engine = LLM(disable_log_stats=False, **given["engine"])
    run = _embed if given["pooling"] else _generate
    rounds = [run(engine, **each) for each in given["rounds"]]
    config = engine.llm_engine.vllm_config
    made = {"runner": "V2" if config.use_v2_model_runner else "V1", "mode": int(config.compilation_config.mode)}
    made["prefills"] = sorted(set(_prefills()))
    return {"rounds": rounds, "metrics": _metrics(engine), "layers": _layers(engine), **made}


def _generate(engine, prompts, max_tokens):
    from vllm import SamplingParams  # noqa: PLC0415 - see above

    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, logprobs=1, ignore_eos=True, detokenize=False)
    outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
    return [
        {
            "tokens": list(each.outputs[0].token_ids),
            "logprobs": [
                at[token].logprob for at, token in zip(each.outputs[0].logprobs, each.outputs[0].token_ids, strict=True)
            ],
            "cached": each.num_cached_tokens,
        }
        for each in outputs
    ]


def _embed(engine, prompts):
    outputs = engine.embed([{"prompt_token_ids": each} for each in prompts], use_tqdm=False)
    return [{"embedding": each.outputs.embedding} for each in outputs]


def _metrics(engine):
    return {each.name: each.value for each in engine.get_metrics() if hasattr(each, "value")}


def _prefills():
    """Yield attnplug's candidates that prefilled latents; nothing where the engine is another process."""
    gc.unfreeze()  # vLLM hides what it has made from the collector
    for each in gc.get_objects():
        if type(each).__name__ == "LatentPrefill" and hasattr(each, "_among_new"):
            yield each._among_new.attn.backend.id


def _layers(engine):
    """Return vLLM's name and attnplug's of the backend of each layer; nothing where the engine is another process."""
    config = engine.llm_engine.vllm_config.compilation_config
    return {
        name: [layer.attn_backend.get_name(), str(getattr(getattr(layer.impl, "selection", None), "id", None))]
        for name, layer in config.static_forward_context.items()
        if hasattr(layer, "attn_backend")  # others are mixtures of experts
    }


if __name__ == "__main__":
    main()
