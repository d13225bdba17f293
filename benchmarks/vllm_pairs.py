"""
Measure vLLM's throughput and the time between tokens: its own attention backend, and the same kernels through attnplug.

    python benchmarks/vllm_pairs.py --pair FLASH_ATTN=flash_attn/fa3_vllm --size 8b --out FILE [--rounds 5]
    python benchmarks/vllm_pairs.py --pair FLASH_ATTN=int8_ixformer/triton --size 8b --kv-cache-dtype int8 --out FILE
    python benchmarks/vllm_pairs.py --pair FLASH_ATTN=blocksparse/triton --size phi3-small --out FILE
    python benchmarks/vllm_pairs.py --pair FLASH_ATTN=flash_attn/fa3_vllm --size 1b-mqa --mode graphs --tp 2 --dcp 2
    python benchmarks/vllm_pairs.py --pair FLASH_ATTN_MLA=flash_attn/fa3_vllm --size mla --out FILE [--own-prefills]
    python benchmarks/vllm_pairs.py --pair FLASH_ATTN_MLA=flash_attn/fa3_vllm=flashmla+flash_attn --size mla-128

All engines live at once, each in a separate process, and take turns: what disturbs one disturbs the others. The last of
more than two is compared with each. Models are Llama-like, or DeepSeek-like with dense layers, with random weights, in
bfloat16. No backend of vLLM has an int8 KV cache of these formats or a block-sparse pattern: there vLLM's own runs the
same model in 16 bits, or with dense attention in all layers. The exit status is 3 where vLLM or the GPU is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NOT_HERE = 3
SIZES: dict[str, dict[str, int]] = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
SIZES["mla"] = {  # DeepSeek-V3's latents and heads of DeepSeek-V2-Lite, all layers dense
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 16,
    "n_routed_experts": 8,
}
SIZES["mla-128"] = SIZES["mla"] | {"num_attention_heads": 128, "num_key_value_heads": 128}  # heads of DeepSeek-V3
SIZES["1b-mqa"] = SIZES["1b"] | {"num_key_value_heads": 1}  # ranks of one head may share its context
LOADS = {
    "64 x (512 + 128)": (64, 512, 128),
    "8 x (8192 + 256)": (8, 8192, 256),
    "2 x (32768 + 128)": (2, 32768, 128),
    "48 x (256 to 8192 + 256)": (48, 8192, 256),
}
SHORTEST = {"48 x (256 to 8192 + 256)": 256}
"""The shortest prompt of a mixed load: prompts grow evenly, and decodes run beside prefills."""
CACHE_BYTES = {
    "1b": 6 << 30,
    "mla": 6 << 30,
    "mla-128": 6 << 30,
    "1b-mqa": 6 << 30,
    "8b": 10 << 30,
    "phi3-small": 10 << 30,
}
PHI3_SMALL = {"model_type": "phi3small", "architectures": ["Phi3SmallForCausalLM"], "max_position_embeddings": 65536}
MODES = {
    "compiled": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"},
    "graphs": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # workers are asked for their backend by a function
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def main() -> int:
    """Measure one pair, or serve one engine to the process that measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", required=True, help="vLLM's backend = backend/variant of attnplug, or more of them")
    parser.add_argument("--size", required=True, choices=sorted(CACHE_BYTES))
    parser.add_argument("--load", action="append", choices=list(LOADS), help="the first two, unless named")
    parser.add_argument(
        "--kv-cache-dtype", choices=("fp8", "int8", "int8_k"), help="int8 formats: of attnplug's engine"
    )
    parser.add_argument("--mode", default="compiled", choices=sorted(MODES))
    parser.add_argument("--own-prefills", action="store_true", help="of latents: on vLLM's backend in both engines")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of tensor parallelism")
    parser.add_argument("--dcp", type=int, default=1, help="those of them that share a context")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file of the results, as JSON")
    parser.add_argument("--wait-for", type=Path, help="measure when this file exists: several pairs may start at once")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("not here: vLLM is not installed", flush=True)
        return NOT_HERE
    if options.serve:
        return _serve(options)
    options.load = options.load or list(LOADS)[:2]
    command = shlex.join(["python", "benchmarks/vllm_pairs.py", *_words(options)])
    started = time.monotonic()
    engines = {name: _start(options, name) for name in options.pair.split("=")}
    ready = {name: _answer(engine) for name, engine in engines.items()}
    found: dict[str, Any] = {"command": command, "start_s": round(time.monotonic() - started, 1), "ready": ready}
    found["loads"] = {}
    _save(options, found)
    while options.wait_for and not options.wait_for.exists():
        time.sleep(0.2)
    for load in options.load:  # a run that is cut off has the loads before
        found["loads"][load] = _measure(engines, load, options.rounds)
        _save(options, found)
    for engine in engines.values():
        engine.stdin.close()  # type: ignore[union-attr]
    print(json.dumps(found, indent=1), flush=True)
    return 0


def _save(options: argparse.Namespace, found: dict[str, Any]) -> None:
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))


def _measure(engines: dict[str, subprocess.Popen[str]], load: str, rounds: int) -> dict[str, Any]:
    """Let the engines take turns; the first run of each is not counted."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name in sorted(engines, reverse=bool(number % 2)):
            engine = engines[name]
            print(load, file=engine.stdin, flush=True)
            sample = _answer(engine)
            if number:
                samples[name].append(sample)
    own, *others, plugged = engines
    found: dict[str, Any] = {}
    for what in ("tokens_per_s", "between_tokens_ms"):
        values = {name: [sample[what] for sample in samples[name]] for name in engines}
        found[what] = {name: round(statistics.median(each), 3) for name, each in values.items()}
        found[what] |= _over(values[plugged], values[own])
        found[what] |= {f"over {name}": _over(values[plugged], values[name]) for name in others}
    return found


def _over(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return the median of the ratios of two engines' rounds, and each."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"ratio": round(statistics.median(ratios), 4), "ratios": [round(ratio, 4) for ratio in ratios]}


def _start(options: argparse.Namespace, backend: str) -> subprocess.Popen[str]:
    words = [*_words(options), "--serve", backend]
    phi3_small, plugged = options.size == "phi3-small", "/" in backend
    plugins = {"VLLM_PLUGINS": "attnplug" if plugged or phi3_small else ""}  # its model is a plugin's on every backend
    if plugged and not phi3_small:  # of which only some layers are block-sparse: attnplug decides
        plugins["ATTNPLUG_BACKEND"] = backend
    return subprocess.Popen(  # noqa: S603 - this script again
        [sys.executable, __file__, *words],
        env=os.environ | ENVIRONMENT | plugins,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _words(options: argparse.Namespace) -> list[str]:
    """Return what both engines of a pair are made of, as arguments."""
    words = ["--pair", options.pair, "--size", options.size, "--mode", options.mode]
    words += ["--kv-cache-dtype", options.kv_cache_dtype] if options.kv_cache_dtype else []
    words += ["--own-prefills"] if options.own_prefills else []
    for name in ("tp", "dcp"):
        count = getattr(options, name)
        words += [f"--{name}", str(count)] if count > 1 else []
    return words


def _answer(engine: subprocess.Popen[str]) -> Any:
    line = engine.stdout.readline()  # type: ignore[union-attr]
    if not line:
        raise RuntimeError(f"an engine ended with {engine.wait()}")
    return json.loads(line)


def _serve(options: argparse.Namespace) -> int:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints is no answer
    engine, prompts = _engine(options)
    config = engine.llm_engine.vllm_config
    ready = {
        "attention": engine.collective_rpc(_attention_of)[0],
        "graphs": str(config.compilation_config.cudagraph_mode),
        "tokens of the KV cache": config.cache_config.num_gpu_blocks * config.cache_config.block_size,
    }
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_run(engine, prompts[line.strip()], *LOADS[line.strip()])), file=answers, flush=True)
    return 0


def _attention_of(worker: Any) -> list[str]:
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    return sorted({_name_of(layer) for layer in layers})


def _name_of(layer: Any) -> str:
    impl, prefills = layer.impl, getattr(layer, "prefill_backend", None)
    name = str(impl.selection.id) if hasattr(impl, "selection") else type(impl).__name__
    return name if prefills is None else f"{name}, prefills on {prefills.get_name()}"


def _engine(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """Return an engine and the prompts of each load."""
    import torch  # noqa: PLC0415 - the measuring process needs none
    from vllm import LLM  # noqa: PLC0415 - likewise

    plugged = "/" in options.serve
    folder = Path(tempfile.mkdtemp())
    _write_config(folder, options.size, plugged=plugged)
    engine = LLM(
        model=str(folder),
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=32768 + 256,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=CACHE_BYTES[options.size],
        gpu_memory_utilization=0.1,
        enable_prefix_caching=False,
        tensor_parallel_size=options.tp,
        decode_context_parallel_size=options.dcp,
        disable_log_stats=False,
        attention_backend="CUSTOM" if plugged else options.serve,
        attention_config={"mla_prefill_backend": "FLASH_ATTN"} if options.own_prefills else None,
        compilation_config=MODES[options.mode] | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
        **_cache_options(options.kv_cache_dtype, folder, plugged=plugged),
    )
    generator = torch.Generator().manual_seed(1)
    prompts = {
        load: torch.randint(3, 100000, (count, length), generator=generator).tolist()
        for load, (count, length, _) in LOADS.items()
    }
    for load, shortest in SHORTEST.items():
        steps = max(len(prompts[load]) - 1, 1)
        prompts[load] = [
            prompt[: shortest + index * (len(prompt) - shortest) // steps] for index, prompt in enumerate(prompts[load])
        ]
    return engine, prompts


def _write_config(folder: Path, size: str, *, plugged: bool) -> None:
    """Write a model's configuration: Llama-like, or Phi-3-small, whose layers are all dense on a backend of vLLM."""
    import transformers  # noqa: PLC0415 - see above

    if size == "phi3-small":
        dense = {"dense_attention_every_n_layers": 2 if plugged else 1, "torch_dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(PHI3_SMALL | dense), encoding="utf-8")
        return
    name = "DeepseekV3" if "kv_lora_rank" in SIZES[size] else "Llama"
    getattr(transformers, f"{name}Config")(
        vocab_size=128256,
        max_position_embeddings=65536,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        architectures=[f"{name}ForCausalLM"],
        dtype="bfloat16",
        **{"q_lora_rank": None} if name == "DeepseekV3" else {},
        **SIZES[size],
    ).save_pretrained(folder)


def _cache_options(dtype: str | None, folder: Path, *, plugged: bool) -> dict[str, Any]:
    """Return the engine's options for a dtype of the KV cache, as vLLM before 0.33 takes them."""
    if dtype is None or dtype == "fp8":
        return {} if dtype is None else {"kv_cache_dtype": dtype}
    if not plugged:
        return {}
    if dtype == "int8":
        os.environ["ATTNPLUG_OPT_INT8_IXFORMER__VALUE_SCALES"] = str(_write_scales(folder))
    page = {"kv_cache_dtype": "int8_per_token_head"} if dtype == "int8" else {}
    return page | {"additional_config": {"attnplug": {"kv_cache_dtype": dtype}}}


def _write_scales(folder: Path) -> Path:
    """Write a calibration that fits no model: with random weights only its shape matters for the time."""
    import torch  # noqa: PLC0415 - see above

    from attnplug_int8_ixformer.value_scales import ValueScales  # noqa: PLC0415 - likewise

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(config["num_hidden_layers"])]
    sizes = config["num_key_value_heads"], config["head_dim"]
    ValueScales({name: torch.full(sizes, 0.01) for name in names}).save(path := folder / "scales.safetensors")
    return path


def _run(engine: Any, prompts: list[list[int]], count: int, length: int, tokens: int) -> dict[str, float]:
    """Generate, and return tokens per second and the mean time between tokens of a request."""
    from vllm import SamplingParams  # noqa: PLC0415 - the measuring process needs none

    del length
    greedy = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
    seconds = time.perf_counter() - start
    if sum(len(each.outputs[0].token_ids) for each in outputs) != count * tokens:
        raise RuntimeError("a request ended early")
    between = [(each.metrics.last_token_ts - each.metrics.first_token_ts) / (tokens - 1) for each in outputs]
    return {"tokens_per_s": count * tokens / seconds, "between_tokens_ms": statistics.mean(between) * 1000}


if __name__ == "__main__":
    sys.exit(main())
