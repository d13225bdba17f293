"""``attnplug demo`` agrees with the library, and detects a backend that does not."""

from __future__ import annotations

import json
import os
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch
from transformers import masking_utils

import attnplug
from attnplug.cli.main import main
from attnplug.selection.selection import Selection
from attnplug_transformers import mask
from attnplug_transformers.demo import example as examples
from attnplug_transformers.demo import read_text
from attnplug_transformers.demo.compare import compare
from attnplug_transformers.demo.example import EXAMPLES
from hosts.transformers.tests.fakes.faulty import MANIFEST, FaultyImpl
from hosts.transformers.tests.fakes.registry import replace_backends
from tests.own_process import own_process  # noqa: F401 - in effect for all tests here
from tools import forked

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[1]
TEXT = """\
An attention backend today is welded into one engine. This project makes it a part that anyone can publish, install,
query, trust and swap: a small core that negotiates, and one distribution per backend. Nothing that was requested is
silently dropped: it is used, or refused with a reason.
"""


@pytest.fixture
def text(tmp_path):
    """Return a file to continue."""
    file = tmp_path / "text.md"
    file.write_text(TEXT)
    return file


@pytest.fixture(autouse=True)
def _one_thread(own_process, monkeypatch):  # noqa: F811 - the fixture above
    """The models are tiny."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def faulty(monkeypatch):
    """Replace all backends by one with a fault."""
    replace_backends(MANIFEST, "hosts.transformers.tests.fakes.faulty", "faulty")
    return lambda fault: monkeypatch.setattr(FaultyImpl, "fault", fault)


def command(*words, **environment):
    settings = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
    return forked.run("-m", "attnplug", "demo", *words, cwd=ROOT, env=settings | {"OMP_NUM_THREADS": "1"} | environment)


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """Return the command's JSON; it runs once."""
    file = tmp_path_factory.mktemp("demo") / "text.md"
    file.write_text(TEXT)
    done = command("--json", "--text", str(file), "--backend", "torch/sdpa")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def models(document):
    """Return the JSON of every model."""
    return document["models"]


@pytest.mark.slow
def test_every_architecture_agrees_token_for_token():
    done = command(COLUMNS="120")

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert f"{len(EXAMPLES)} of {len(EXAMPLES)} architectures agree, 1760 of 1760 tokens" in done.stdout
    for example in EXAMPLES:
        assert f"\n{example.name}: {example.about}" in done.stdout
    shown = " ".join(done.stdout.split())
    assert shown.index("every verdict: attnplug explain") < shown.index("Llama: ")
    for words in (
        "for GPUs their kernel libraries are assumed to be installed. A layer of gpt-oss: head_size=64,",
        "cpu (this one) torch/sdpa (the only one that supports it) not chosen ",
        "cuda:8.0 (A100) ",
        "cuda:9.0 (H100) ",
        "cuda:10.0 (B200) ",
        "10 requests with prompts of 5 to 90 tokens",
        "max concurrency 4 (4 allowed)",
        "at most 32 tokens a step (32 allowed)",
        "prefix caching: 2 requests found the beginning of their prompt in blocks of an earlier one, 112 tokens in all",
        "1 preemption, recomputed later",
        "max concurrency 4, step by step as for Llama",
        "layers.{0..3}.self_attn (4 layers) -> torch/",
        "requires sliding_window=16, logits_soft_cap=5.0",
        "torch/sdpa: gathers pages into one buffer each step (slower)",
        "torch/flex refused: ",
        "all 320 tokens are those of transformers' generate of each prompt alone",
        "all once more, with decodes replayed from 6 captured steps on graph buffers",
        "4 sentences of 96, 23, 67, 5 tokens in one batch, padded to 96, every third token masked",
        "requires attn_type=encoder_only",
        "hidden states and logits differ by at most ",
        "model.encoder.layers.{0,1}.self_attn (2 layers) -> torch/sdpa (requires attn_type=encoder;",
        "model.decoder.layers.{0,1}.encoder_attn (2 layers) -> torch/sdpa (requires attn_type=encoder_decoder;",
    ):
        assert words in shown


@pytest.mark.slow
def test_json_has_a_decision_for_each_device(document):
    decisions = document["decisions"]
    assert [one["label"].split()[0] for one in decisions] == ["cpu", "cuda:8.0", "cuda:9.0", "cuda:10.0"]
    assert [one["assumed_installed"] for one in decisions] == [False, True, True, True]
    assert {one["chosen"] for one in decisions} == {"torch/sdpa"}  # by --backend
    assert {one["provenance"]["backend"] for one in decisions} == {"--backend"}
    installed = {point.name for point in entry_points(group="attnplug.backends")}
    for one in decisions:
        assert {verdict["id"].partition("/")[0] for verdict in one["verdicts"]} >= installed  # all plugins take part
        assert one["runner_up"] != one["chosen"]


@pytest.mark.slow
def test_json(models):
    assert [found["name"] for found in models] == [example.name for example in EXAMPLES]
    assert [found["num_tokens"] for found in models] == [320] * 5 + [64, 96]
    assert all(found["agrees"] and found["num_equal"] == found["num_tokens"] for found in models)
    assert all(found["tokens"] == found["expected"] for found in models)
    assert all(found["margin"] >= 1e-3 for found in models)  # rounding decides no token
    assert all(len({token for row in found["tokens"] for token in row}) > 8 for found in models)
    required = decisions(models[3])["model.layers.0.self_attn"].requirements
    assert (required.sinks, required.sliding_window, required.paged) == (True, 16, True)


@pytest.mark.slow
def test_json_has_the_counters_of_the_engine(models):
    engines = [found["engine"] for found in models]
    assert [found["replay"] for found in models[5:]] == [None] * 2
    windowed = next(i for i, example in enumerate(EXAMPLES) if example.name == "Mistral")
    others = engines[:windowed] + engines[windowed + 1 :]
    assert others == [engines[0]] * 4 + [None] * 2  # the schedule depends on lengths alone
    # Blocks that the window has left are freed: where the others preempt a request, this one need not.
    assert engines[windowed]["num_preemptions"] < engines[0]["num_preemptions"]
    assert engines[windowed]["num_steps"] < engines[0]["num_steps"]
    assert engines[0]["num_requests"] > engines[0]["peak_running"] == engines[0]["max_num_reqs"] == 4
    assert engines[0]["last_arrival"] > 0
    assert engines[0]["peak_tokens"] == engines[0]["max_num_tokens"] == 32
    assert engines[0]["num_prefill_chunks"] > engines[0]["num_requests"]
    assert (engines[0]["num_prefix_hits"], engines[0]["num_cached_tokens"]) == (2, 112)
    assert engines[0]["num_preemptions"] == 1
    for found in models[:5]:
        assert found["replay"] == {"num_captured": 6, "num_equal": 320, "tokens": found["expected"]}
    assert engines[0]["peak_blocks"] <= engines[0]["num_blocks"] == 18


@pytest.mark.slow
def test_json_has_the_type_of_each_layer(models):
    bert, whisper = models[5:]
    assert set(kinds(bert).values()) == {"encoder_only"}
    assert set(kinds(whisper).values()) == {"encoder", "decoder", "encoder_decoder"}
    assert len(kinds(whisper)) == 6
    for found in (bert, whisper):
        assert 0 < found["distance"]["largest"] < found["distance"]["allowed"]


def kinds(found):
    return {name: selection.requirements.attn_type for name, selection in decisions(found).items()}


def decisions(found):
    return {name: Selection.from_dict(layer) for name, layer in found["layers"].items()}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param("Mistral", "window", marks=pytest.mark.slow),
        pytest.param("Gemma 2", "window", marks=pytest.mark.slow),
        pytest.param("Gemma 2", "logits_soft_cap", marks=pytest.mark.slow),
        pytest.param("gpt-oss", "sinks", marks=pytest.mark.slow),
        pytest.param("Llama", "slots", marks=pytest.mark.slow),
        pytest.param("Llama", "prefix", marks=pytest.mark.slow),
        ("Llama", "pages"),
        pytest.param("Qwen3", "length", marks=pytest.mark.slow),
        ("BERT", "borders"),
        pytest.param("Whisper", "borders", marks=pytest.mark.slow),
        pytest.param("Whisper", "cross", marks=pytest.mark.slow),
    ],
)
def test_a_faulty_backend_is_detected(name, fault, faulty):
    example = next(example for example in EXAMPLES if example.name == name)
    faulty(fault)

    outcome = compare(example, TEXT.encode())

    assert not outcome.agrees
    assert outcome.num_equal < 0.7 * outcome.num_tokens


def test_a_host_that_attends_to_padding_is_detected(monkeypatch):
    def without_padding(**arguments):
        return masking_utils.sdpa_mask(**arguments | {"attention_mask": None})

    monkeypatch.setattr(mask, "sdpa_mask", without_padding)

    outcome = compare(EXAMPLES[5], TEXT.encode())

    assert not outcome.agrees
    assert not outcome.distance.is_small


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["graphs", "padding"])
def test_a_backend_that_is_wrong_in_graphs_alone_is_detected(fault, faulty):
    faulty(fault)

    outcome = compare(EXAMPLES[0], TEXT.encode())

    assert outcome.tokens == outcome.expected
    assert not outcome.agrees


@pytest.mark.slow
def test_the_same_backend_without_a_fault_agrees(text, faulty, capsys):
    faulty("")

    assert main(["demo", "--text", str(text)]) == 0

    assert "7 of 7 architectures agree" in capsys.readouterr().out


@pytest.fixture
def few(monkeypatch):
    """Leave out models that would test the same again."""
    kept = [example for example in EXAMPLES if example.name in {"Llama", "BERT", "Whisper"}]
    monkeypatch.setattr(examples, "EXAMPLES", kept)


def on_terminal(monkeypatch):
    """Make standard error a terminal; `capsys` captures it all the same."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def test_a_wrong_backend_is_reported(text, faulty, few, monkeypatch, capsys):
    on_terminal(monkeypatch)
    faulty("slots")

    assert main(["demo", "--text", str(text)]) == 1

    done = capsys.readouterr()
    shown = " ".join(done.out.split())
    assert "running BERT" in done.err
    assert "1/3" in done.err
    assert "running" not in done.out
    assert shown.count("WRONG: ") == 1
    assert "of 320 tokens agree; token " in shown
    assert "2 of 3 architectures agree" in shown


def test_json_of_a_wrong_backend(text, faulty, few, monkeypatch, capsys):
    on_terminal(monkeypatch)
    faulty("borders")

    assert main(["demo", "--json", "--text", str(text)]) == 1

    done = capsys.readouterr()
    document = json.loads(done.out)
    assert done.err == ""
    assert not document["agrees"]
    assert [found["name"] for found in document["models"] if not found["agrees"]] == ["BERT", "Whisper"]


@pytest.mark.slow
def test_a_named_backend_is_used(models):
    chosen = [selection for found in models for selection in decisions(found).values()]
    assert {(selection.id, selection.provenance["backend"]) for selection in chosen} == {("torch/sdpa", "--backend")}


def test_a_backend_that_does_not_support_the_models(text, capsys):
    assert main(["demo", "--text", str(text), "--backend", "flash_attn"]) == 1

    assert "flash_attn" in capsys.readouterr().err


def test_without_transformers_the_extra_is_named(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    done = forked.run_fresh("-m", "attnplug", "demo", env=environment)

    assert done.returncode == 1
    assert "pip install 'attnplug[transformers]'" in done.stderr


@pytest.mark.parametrize(("name", "said"), [("missing.md", "does not open"), ("short.md", "has 3 bytes")])
def test_invalid_texts(tmp_path, name, said, capsys):
    (tmp_path / "short.md").write_text("abc")

    assert main(["demo", "--text", str(tmp_path / name)]) == 2

    assert said in capsys.readouterr().err


def test_without_a_readme_the_package_describes_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    text, origin = read_text(None)

    assert origin == "attnplug's own description"
    assert text == str(attnplug.__doc__).encode()


def test_no_backend_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--backend", "flashinfer"]) == 1

    assert "among 'flashinfer' (--backend)" in capsys.readouterr().err
