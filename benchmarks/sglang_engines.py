"""Whole engines of SGLang, each in a process: log-probabilities beside transformers in float32, and tokens/s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ON_CPU = "SGLANG_HOST_ON_CPU"
if __name__ != "sglang_engines" and os.environ.get(ON_CPU):  # this program, or a process of its engine
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from hosts.sglang.tests import stand_ins

    stand_ins.install_for_engines()

LONGEST = 600
"""Seconds that an engine may take."""


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
    command = [sys.executable, __file__, str(given), str(result)]
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


if __name__ == "__main__":
    from attnplug_sglang import register

    register()
    Path(sys.argv[2]).write_text(json.dumps(serve(json.loads(Path(sys.argv[1]).read_text()))))
