"""
Whole engines of SGLang, each in a process. `sglang_host.py --engines` compares their log-probabilities with
transformers in float32. As a program it measures the throughput, and the time between tokens, of a pair of engines: on
a backend of SGLang, and through attnplug.

    python benchmarks/sglang_engines.py --pair triton=flash_attn/fa3_vllm --size 1b --out FILE [--rounds 5]
    python benchmarks/sglang_engines.py --pair flashinfer=flashinfer/fa2 --size 8b --load "8 x (8192 + 128)" --out FILE
    python benchmarks/sglang_engines.py --pair triton=flashmla/sgl --size mla --page-size 64 --out FILE
    python benchmarks/sglang_engines.py --pair fa3=flashmla/sgl=flashmla+flash_attn --size mla-128 --page-size 64
    python benchmarks/sglang_engines.py --pair torch_native=torch/sdpa --size tiny --device cpu --rounds 1 --out FILE

All engines live at once and take turns: what disturbs one disturbs the others. The last of more than two is compared
with each. Models are Llama-like, or DeepSeek-like with dense layers, with random weights, in bfloat16 on a GPU. The
exit status is 3 where SGLang or the GPU is missing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_pairs import SIZES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ON_CPU = "SGLANG_HOST_ON_CPU"
if __name__ != "sglang_engines":  # this program, or a process of its engine
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from hosts.sglang.tests import stand_ins

    if os.environ.get(ON_CPU):
        stand_ins.install_for_engines()
    else:
        stand_ins.install_for_latents()

NOT_HERE = 3
LONGEST = 600
"""Seconds that an engine may take."""

TINY = dict(zip(SIZES["1b"], (64, 128, 2, 4, 2, 16), strict=True))
LATENT = {  # beside sizes of latents
    "architectures": ["DeepseekV3ForCausalLM"],
    "q_lora_rank": None,  # as DeepSeek-V2-Lite
    "moe_layer_freq": 1,  # SGLang reads it, and no layer has experts
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
LOADS = {
    "64 x (512 + 128)": (64, 512, 128),
    "8 x (8192 + 128)": (8, 8192, 128),
    "4 x (12 + 8)": (4, 12, 8),
    "48 x (256 to 8192 + 256)": (48, 8192, 256),
}
"""Requests, prompt tokens and new tokens."""

SHORTEST = {"48 x (256 to 8192 + 256)": 256}
"""The shortest prompt of a mixed load: prompts grow evenly, and decodes run beside prefills."""


def rows(names: list[str], is_wanted: Callable[[str], bool], *, device: str, tiny: bool) -> Iterator[list[str]]:
    """
    Yield the results of each backend, eager and with graphs.

    Args:
        names: Of SGLang's registry.
        is_wanted: Whether a row is to be measured, by its name.
        device: ``"cpu"`` or ``"cuda"``.
        tiny: Whether the model and the load are small.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder), tiny=tiny)
        job = {"model": folder, "device": device, "tokens": 8 if tiny else 64}
        job["prompts"] = _prompts(*((4, 12) if tiny else (32, 512)))
        for name in names:
            for graphs in (False, True) if device == "cuda" else (False,):
                row = f"engine, {'graph' if graphs else 'eager'}, {name}"
                if not is_wanted(row):
                    continue
                found = _run({**job, "name": name, "graphs": graphs}, Path(folder))
                if isinstance(found, str):
                    yield [name, "yes" if graphs else "no", f"does not run: {found}", "-"]
                else:
                    error = _difference(model.to(device), job["prompts"], found)
                    yield [name, "yes" if graphs else "no", f"{error:.2e}", f"{found['tokens_per_s']:.0f}"]
                print(f"{row} | measured", flush=True)


def _model(folder: Path, *, tiny: bool) -> Any:
    """Write a Llama with random weights, and return it in float32."""
    import torch  # noqa: PLC0415 - not in the processes of an engine, before SGLang
    import transformers  # noqa: PLC0415 - likewise

    sizes = (64, 128, 2, 4, 2, 16) if tiny else (2048, 8192, 8, 16, 4, 128)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        **dict(zip((*keys, "head_dim"), sizes, strict=True)),
        vocab_size=512,
        max_position_embeddings=2048,
        initializer_range=0.2 if tiny else 0.05,
    )
    made = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for weight in made.parameters():  # both sides have them in bfloat16; frequencies of rotations are no weights
        weight.data = weight.data.bfloat16().float()
    made.save_pretrained(folder)
    return made


def _prompts(count: int, length: int) -> list[list[int]]:
    import random  # noqa: PLC0415 - as above

    return [[random.Random(i * 7919 + j).randrange(3, 512) for j in range(length + i)] for i in range(count)]


def _run(job: dict[str, Any], folder: Path) -> Any:
    """Return what an engine gave, or why it gave nothing."""
    given, result, log = folder / "job.json", folder / "result.json", folder / "log"
    given.write_text(json.dumps(job))
    result.unlink(missing_ok=True)
    command = [sys.executable, __file__, str(given), str(result)]  # see the end of this file
    with log.open("w") as written:
        try:
            subprocess.run(command, stdout=written, stderr=written, timeout=LONGEST, check=False)  # noqa: S603 - this file
        except subprocess.TimeoutExpired:
            return f"killed after {LONGEST} s"
    if result.is_file():
        return json.loads(result.read_text())
    whole = log.read_text(errors="replace")
    print(whole[-8000:], file=sys.stderr, flush=True)
    said = [line for line in whole.splitlines() if "Error" in line]
    return (said[-1] if said else "it ended without a result")[-200:].replace("|", "/")


def _difference(model: Any, prompts: list[list[int]], found: dict[str, Any]) -> float:
    """Return the mean difference of the log-probabilities of generated tokens."""
    import torch  # noqa: PLC0415 - as above

    differences = []
    for prompt, answer in zip(prompts, found["answers"], strict=True):
        row = torch.tensor([prompt + answer["tokens"]], device=model.device)
        with torch.no_grad():
            expected = model(row).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        at = torch.tensor(answer["tokens"], device=model.device)[:, None]
        given = torch.tensor(answer["logprobs"], device=model.device)
        differences.append((expected.gather(1, at)[:, 0] - given).abs())
    return float(torch.cat(differences).mean())


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Run an engine twice, and return the answers and the speed of the second time."""
    import sglang  # noqa: PLC0415 - not in the processes of the engine

    engine = sglang.Engine(
        model_path=job["model"],
        device=job["device"],
        attention_backend=job["name"],
        dtype="float32" if job["device"] == "cpu" else "bfloat16",
        skip_tokenizer_init=True,
        page_size=16,
        max_total_tokens=32 * 1024 if job["device"] == "cuda" else 2048,
        max_running_requests=32,
        mem_fraction_static=0.3,
        disable_cuda_graph=not job["graphs"],
        disable_radix_cache=True,
        grammar_backend="none",
        sampling_backend="pytorch",  # FlashInfer's compiles a module first
        random_seed=1,
        log_level="info",
    )
    sampling = {"temperature": 0, "max_new_tokens": job["tokens"], "ignore_eos": True}
    try:
        for _ in range(2):
            start = time.perf_counter()
            found = engine.generate(input_ids=job["prompts"], sampling_params=sampling, return_logprob=True)
            seconds = time.perf_counter() - start
    finally:
        engine.shutdown()
    return {
        "answers": [
            {
                "tokens": one["output_ids"],
                "logprobs": [each[0] for each in one["meta_info"]["output_token_logprobs"]],
            }
            for one in found
        ],
        "tokens_per_s": len(job["prompts"]) * job["tokens"] / seconds,
    }


# Pairs


def main() -> int:
    """Measure a pair, or serve one engine to the process that measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", required=True, help="SGLang's backend = backend/variant of attnplug, or more of them")
    parser.add_argument("--size", required=True, choices=[*SIZES, "tiny"])
    parser.add_argument(
        "--load", action="append", choices=list(LOADS), help="the first two, or of a tiny model the last"
    )
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file of the results, as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=float, default=0.4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("sglang") is None or (options.device == "cuda" and not _has_gpu()):
        print("not here: SGLang or the GPU is missing", flush=True)
        return NOT_HERE
    options.load = options.load or (list(LOADS)[2:3] if options.size == "tiny" else list(LOADS)[:2])
    return _serve(options) if options.serve else _measure_pair(options)


def _has_gpu() -> bool:
    import torch  # noqa: PLC0415 - as above

    return torch.cuda.is_available()


def _measure_pair(options: argparse.Namespace) -> int:
    names = options.pair.split("=")
    engines: dict[str, subprocess.Popen[str]] = {}
    found: dict[str, Any] = {"command": " ".join(["python benchmarks/sglang_engines.py", *sys.argv[1:]]), "loads": {}}
    try:
        for left, name in zip(range(len(names), 0, -1), names, strict=True):
            engines[name] = _start(name, 1 / (left + 0.5))  # of what is free when the engine starts
            found.setdefault("ready", {})[name] = _answer(engines[name])
        for load in options.load:  # a run that is cut off has the loads before
            found["loads"][load] = _turns(engines, load, options.rounds)
            if options.out:
                options.out.write_text(json.dumps(found, indent=1))
    finally:
        for engine in engines.values():
            engine.stdin.close()  # type: ignore[union-attr]
            engine.wait(LONGEST)
    print(json.dumps(found, indent=1), flush=True)
    return 0


def _start(name: str, memory: float) -> subprocess.Popen[str]:
    is_pair = "+" in name  # which SGLang has no name for
    served = "attnplug" if is_pair else f"attnplug:{name}" if "/" in name else name
    words = [*sys.argv[1:], "--serve", served, "--memory", str(memory)]
    setting = {"ATTNPLUG_BACKEND": name} if is_pair else {}
    on_cpu = {ON_CPU: "1"} if "cpu" in sys.argv[1:] else {}
    return subprocess.Popen(  # noqa: S603 - this script again
        [sys.executable, __file__, *words],
        env={"HF_HUB_OFFLINE": "1", **os.environ, **on_cpu, **setting},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _answer(engine: subprocess.Popen[str]) -> Any:
    line = engine.stdout.readline()  # type: ignore[union-attr]
    if not line:
        message = f"an engine ended with {engine.wait()}"
        raise RuntimeError(message)
    return json.loads(line)


def _turns(engines: dict[str, subprocess.Popen[str]], load: str, rounds: int) -> dict[str, Any]:
    """Let the engines take turns; the first run of each is not counted."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for number in range(rounds + 1):
        for name in sorted(engines, reverse=bool(number % 2)):
            print(load, file=engines[name].stdin, flush=True)
            sample = _answer(engines[name])
            if number:
                samples[name].append(sample)
    own, *others, plugged = engines
    found: dict[str, Any] = {}
    for what in ("tokens_per_s", "between_tokens_ms"):
        values = {name: [sample[what] for sample in samples[name]] for name in engines}
        found[what] = {
            name: {"median": statistics.median(each), "spread": [min(each), max(each)]} for name, each in values.items()
        }
        found[what] |= _over(values[plugged], values[own])
        found[what] |= {f"over {name}": _over(values[plugged], values[name]) for name in others}
    return found


def _over(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return the median of the ratios of two engines' rounds, and each."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return {"ratio": statistics.median(ratios), "ratios": ratios}


def _serve(options: argparse.Namespace) -> int:
    """Answer each load, a line of standard input, by what its run took."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever SGLang prints is no answer
    with tempfile.TemporaryDirectory() as folder:
        engine = _paired_engine(options, Path(folder))
        try:
            print(json.dumps({"version": importlib.import_module("sglang").__version__}), file=answers, flush=True)
            for line in sys.stdin:
                print(json.dumps(_timed(engine, line.strip())), file=answers, flush=True)
        finally:
            engine.shutdown()
    return 0


def _paired_engine(options: argparse.Namespace, folder: Path) -> Any:
    import sglang  # noqa: PLC0415 - not in the processes of the engine
    import transformers  # noqa: PLC0415 - likewise

    sizes: dict[str, Any] = dict(TINY if options.size == "tiny" else SIZES[options.size])
    kind, further = transformers.LlamaConfig, {"architectures": ["LlamaForCausalLM"]}
    if "kv_lora_rank" in sizes:
        kind, further = transformers.DeepseekV3Config, LATENT
    kind(
        vocab_size=512 if options.size == "tiny" else 128256,
        max_position_embeddings=16384,
        torch_dtype="float32" if options.device == "cpu" else "bfloat16",
        **sizes,
        **further,
    ).save_pretrained(folder)
    loads = [LOADS[load] for load in options.load]
    tokens = max(count * (length + new + options.page_size) for count, length, new in loads)
    requests = max(count for count, _, _ in loads)
    return sglang.Engine(
        model_path=str(folder),
        load_format="dummy",
        device=options.device,
        attention_backend=options.serve,
        dtype="float32" if options.device == "cpu" else "bfloat16",
        skip_tokenizer_init=True,
        page_size=options.page_size,
        max_total_tokens=tokens + 4096,
        max_running_requests=requests,
        mem_fraction_static=options.memory,
        disable_radix_cache=True,
        grammar_backend="none",
        sampling_backend="pytorch",
        random_seed=1,
        log_level="error",
        disable_cuda_graph=options.eager or options.device == "cpu",
    )


def _timed(engine: Any, load: str) -> dict[str, float]:
    """Return tokens per second, and the mean time between the tokens of a request: without that of the first ones."""
    import random  # noqa: PLC0415 - as above

    drawn, (count, longest, tokens) = random.Random(1), LOADS[load]
    shortest = SHORTEST.get(load, longest)
    lengths = [shortest + index * (longest - shortest) // max(count - 1, 1) for index in range(count)]
    prompts = [[drawn.randrange(3, 512) for _ in range(length)] for length in lengths]
    seconds = {}
    for new in (1, tokens):
        start = time.perf_counter()
        found = engine.generate(
            input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
        )
        seconds[new] = time.perf_counter() - start
        if any(len(one["output_ids"]) != new for one in found):
            message = "a request ended early"
            raise RuntimeError(message)
    return {
        "tokens_per_s": count * tokens / seconds[tokens],
        "between_tokens_ms": (seconds[tokens] - seconds[1]) / (tokens - 1) * 1000,
    }


if __name__ == "__main__":
    is_job = len(sys.argv) == 3 and sys.argv[1].endswith(".json")  # of `rows`
    if is_job or "--serve" in sys.argv[1:]:
        from attnplug_sglang import register

        register()
    if not is_job:
        sys.exit(main())
    Path(sys.argv[2]).write_text(json.dumps(serve(json.loads(Path(sys.argv[1]).read_text()))))
