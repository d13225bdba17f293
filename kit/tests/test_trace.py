"""Definitions and workloads of FlashInfer Trace: the reference against the oracle, and the files."""

from __future__ import annotations

import argparse
import json
from math import log
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402 - without torch there is no reference

import attnplug  # noqa: E402
from attnplug.contract import Layer, Limits, recording  # noqa: E402
from attnplug.errors import RequestError  # noqa: E402
from attnplug.request import Requirements  # noqa: E402
from attnplug_kit import check as check_command  # noqa: E402
from attnplug_kit import trace  # noqa: E402
from attnplug_kit.oracle import cases, materialize  # noqa: E402
from attnplug_kit.trace.definition import definitions_of  # noqa: E402
from attnplug_kit.trace.solution import read_definition  # noqa: E402
from core.tests.contract.world import make_batch  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from attnplug_kit.oracle import Scene
    from attnplug_kit.trace.definition import Definition

LAYER = {"head_size": 16, "num_q_heads": 4, "num_kv_heads": 2, "dtype": "bfloat16", "block_size": 4}
FEATURES = ("sliding_window", "logits_soft_cap", "sinks", "head_size_v", "latent")


@pytest.fixture
def command(tmp_path: Path):
    """Return ``command(*words)``: run it with a folder, and return that."""

    def call(*words: str) -> Path:
        parser = argparse.ArgumentParser()
        trace.add_arguments(parser)
        assert trace.run(parser.parse_args([*words, "--out", str(tmp_path)])) == 0
        return tmp_path

    return call


def inputs_of(definition: Definition, scene: Scene) -> dict[str, Any]:
    """Return the tensors of a scene as the inputs of a definition."""
    case = scene.case
    found: dict[str, Any] = {"q": torch.cat(scene.queries), "sm_scale": scene.scale, "sinks": scene.sinks}
    found |= {"k": torch.cat(scene.keys), "v": torch.cat(scene.values), "logits_soft_cap": case.logits_soft_cap}
    offsets = torch.tensor([0, *case.query_lens]).cumsum(0).int()
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    found |= {"qo_indptr": offsets, "kv_indptr": torch.tensor([0, *counts]).cumsum(0).int()}
    found["kv_indices"] = torch.cat([row[:n] for row, n in zip(scene.block_table, counts, strict=True)])
    last = [length - (n - 1) * case.block_size if n else 0 for length, n in zip(case.seq_lens, counts, strict=True)]
    found["kv_last_page_len"] = torch.tensor(last).int()
    for name, rows in (("k_cache", scene.keys), ("v_cache", scene.values)):
        pages = torch.full((scene.num_blocks, case.block_size, *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype)
        for request, own in enumerate(rows):
            places = torch.arange(len(own))
            pages[scene.block_table[request].long()[places // case.block_size], places % case.block_size] = own
        found[name] = pages
    if case.latent:
        size = case.head_size_v or case.head_size
        found |= {"q_nope": found["q"][..., :size], "q_pe": found["q"][..., size:]}
        found |= {"ckv_cache": found["k_cache"][:, :, 0, :size], "kpe_cache": found["k_cache"][:, :, 0, size:]}
    if definition.op_type == "gqa_ragged":
        found["kv_indptr"] = torch.tensor([0, *case.seq_lens]).cumsum(0).int()
    return {name: found[name] for name in definition.inputs}


def compare_with_oracle(scene: Scene, *, paged: bool) -> None:
    phases = ("decode",) if set(scene.case.query_lens) == {1} else ("prefill",)
    case = scene.case
    requirements = case.requirements(paged=paged, phases=phases if paged else ("prefill", "decode"))
    (definition,) = definitions_of(requirements)
    names: dict[str, Any] = {}
    exec(definition.reference, names)  # noqa: S102 - a bare namespace shows that the text is complete

    output, lse = names["run"](**inputs_of(definition, scene))

    exact = scene.expected()
    limit = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[case.dtype]
    torch.testing.assert_close(output.double(), exact.output, rtol=limit, atol=limit)
    assert output.dtype == scene.queries[0].dtype
    torch.testing.assert_close(lse.double() * log(2), exact.lse_with_sink, rtol=1e-5, atol=1e-5)


@given(cases(features=FEATURES))
def test_the_reference_of_pages_computes_what_the_oracle_does(case) -> None:
    compare_with_oracle(materialize(case), paged=True)


@given(cases(features=("sliding_window", "logits_soft_cap", "sinks", "head_size_v")))
def test_the_reference_of_contiguous_keys_computes_what_the_oracle_does(case) -> None:
    compare_with_oracle(materialize(case), paged=False)


@given(cases(features=FEATURES, query_lens=(1, 1, 1), context_lens=(0, 9, 40)))
def test_the_reference_of_decodes_computes_what_the_oracle_does(case) -> None:
    compare_with_oracle(materialize(case), paged=True)


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({}, ("gqa_paged_decode_h4_kv2_d16_ps4", "gqa_paged_prefill_causal_h4_kv2_d16_ps4")),
        ({"phases": ["decode"], "sinks": True, "sliding_window": 128}, ("gqa_paged_decode_h4_kv2_d16_ps4_w128_sinks",)),
        (
            {"paged": False, "block_size": None, "dtype": "float16", "logits_soft_cap": 30.0},
            ("gqa_ragged_prefill_causal_h4_kv2_d16_cap_float16",),
        ),
        (
            {"latent": True, "head_size": 576, "head_size_v": 512, "num_kv_heads": 1, "block_size": None},
            ("mla_paged_decode_h4_ckv512_kpe64_ps16", "mla_paged_prefill_causal_h4_ckv512_kpe64_ps16"),
        ),
    ],
)
def test_each_layer_has_its_definitions(fields: dict[str, Any], names: tuple[str, ...]) -> None:
    found = definitions_of(Requirements.from_dict({k: v for k, v in {**LAYER, **fields}.items() if v is not None}))

    assert tuple(definition.name for definition in found) == names
    for definition in found:
        text = definition.to_dict()
        used = {axis for part in ("inputs", "outputs") for one in text[part].values() for axis in one["shape"] or ()}
        assert used <= set(text["axes"])
        assert {name for name, axis in text["axes"].items() if axis["type"] == "var"} <= used


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"alibi": "linear"}, "alibi='linear'"),
        ({"attention_chunk": 16}, "attention_chunk=16"),
        ({"custom_mask": True}, "custom_mask=True"),
        ({"causal": False}, "causal=False"),
        ({"attn_type": "encoder_only", "block_size": None}, "attn_type='encoder_only'"),
        ({"kv_layout": "HND"}, "kv_layout='HND'"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype='fp8_e4m3'"),
        ({"late": ["num_q_heads"], "num_q_heads": None}, "late=['num_q_heads']"),
        ({"features": ["acme.rope"]}, "features=['acme.rope']"),
        ({"dcp_size": 2}, "dcp_size=2"),
    ],
)
def test_what_the_format_cannot_express_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    layer = Requirements.from_dict({k: v for k, v in {**LAYER, **fields}.items() if v is not None})

    with pytest.raises(RequestError, match="cannot express") as caught:
        definitions_of(layer)

    assert name in str(caught.value)


def test_fields_that_change_no_result_are_tags() -> None:
    found = definitions_of(Requirements(**LAYER, cudagraph="uniform_batch", return_lse=True))

    assert {"attnplug:cudagraph=uniform_batch", "attnplug:return_lse=True"} <= set(found[0].tags)


def test_layers_of_one_definition_are_one_file_with_all_tags(command) -> None:
    layers = [Requirements(**LAYER, cudagraph=level) for level in ("never", "uniform_batch")]

    folder = command("--requirements", json.dumps([layer.to_dict() for layer in layers]))

    (definition,) = {definitions_of(layer)[0].path for layer in layers}
    tags = json.loads((folder / definition).read_text())["tags"]
    assert set(tags) == {tag for layer in layers for tag in definitions_of(layer)[0].tags}


def test_steps_are_workloads_whose_tensors_the_reference_takes(command, tmp_path: Path) -> None:
    text = json.dumps({**LAYER, "sinks": True})
    batches = ("decode:3x9", "mixed:2x8+1x5", "decode:3x9")
    folder = command("--requirements", text, *(word for batch in batches for word in ("--batch", batch)))

    for definition in definitions_of(Requirements.from_dict(json.loads(text))):
        assert json.loads((folder / definition.path).read_text()) == definition.to_dict()
        path = folder / definition.path.replace("definitions/", "workloads/").replace(".json", ".jsonl")
        (line,) = map(json.loads, path.read_text().splitlines())  # the same step is one workload
        assert (line["definition"], line["solution"], line["evaluation"]) == (definition.name, None, None)
        workload = line["workload"]
        tensors = read_safetensors(folder, workload["inputs"])
        values = {**definition.axes, **workload["axes"]}
        inputs: dict[str, Any] = {}
        for name, (axes, dtype) in definition.inputs.items():
            kind = workload["inputs"][name]["type"]
            shape = [values[axis] for axis in axes or ()]
            if kind == "random":
                inputs[name] = torch.randn(shape).to(getattr(torch, dtype))
            else:
                inputs[name] = tensors[name] if kind == "safetensors" else workload["inputs"][name]["value"]
            assert kind == "scalar" or list(inputs[name].shape) == shape
        names: dict[str, Any] = {}
        exec(definition.reference, names)  # noqa: S102 - our own text
        output, lse = names["run"](**inputs)
        assert output.isfinite().all()
        assert lse.isfinite().all()


def test_recorded_steps_are_workloads(command, tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "steps.jsonl"
    monkeypatch.setenv("ATTNPLUG_RECORD", str(file))
    attnplug.refresh()
    recording.recorder.cache_clear()
    layer = {**LAYER, "block_size": None, "cudagraph": "never"}
    backend = attnplug.load(Requirements(**layer), attnplug.Device.cpu(), backend="torch/sdpa")
    limits = Limits(max_num_reqs=4, max_num_tokens=64, max_seq_len=256)
    builder = backend.make_builder([backend.make_impl(Layer(name="one"))], backend.make_state(limits))
    for query_lens, seq_lens in (((1, 1), (4, 21)), ((3, 1), (20, 9)), ((1, 1), (4, 21))):
        builder.build(make_batch(list(query_lens), list(seq_lens), block_size=16))
    monkeypatch.delenv("ATTNPLUG_RECORD")
    attnplug.refresh()

    folder = command("--steps", str(file), "--json")

    found = json.loads(capsys.readouterr().out)
    assert sorted(found["times"].values()) == [1, 2]
    (path,) = folder.glob("workloads/gqa_paged/gqa_paged_prefill_causal_h4_kv2_d16_ps16.jsonl")
    workload = json.loads(path.read_text())["workload"]
    tensors = read_safetensors(folder, workload["inputs"])
    assert tensors["qo_indptr"].tolist() == [0, 3, 4]
    assert tensors["kv_indptr"].tolist() == [0, 2, 3]
    assert tensors["kv_last_page_len"].tolist() == [4, 9]
    assert sorted(tensors["kv_indices"].tolist()) == [0, 1, 2]


def read_safetensors(folder: Path, inputs: dict[str, Any]) -> dict[str, Any]:
    """Read by the description of the format, not by the code that writes it."""
    paths = {one["path"] for one in inputs.values() if one["type"] == "safetensors"}
    (data,) = ((folder / path).read_bytes() for path in paths)
    size = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        begin, end = entry["data_offsets"]
        assert entry["dtype"] == "I32"
        found[name] = torch.frombuffer(bytearray(data[8 + size + begin : 8 + size + end]), dtype=torch.int32)
        assert list(found[name].shape) == entry["shape"]
    assert set(found) == {one["tensor_key"] for one in inputs.values() if one["type"] == "safetensors"}
    return found


def test_a_refused_layer_leaves_nothing_behind(command, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="alibi='linear'"):
        command("--requirements", json.dumps([LAYER, {**LAYER, "alibi": "linear"}]), "--batch", "decode:1x4")

    assert list(tmp_path.iterdir()) == []


def test_steps_of_latents_need_a_scale(command) -> None:
    latent = {**LAYER, "latent": True, "head_size": 576, "head_size_v": 512, "num_kv_heads": 1}

    with pytest.raises(RequestError, match="without a scale"):
        command("--requirements", json.dumps(latent), "--batch", "decode:1x4")
    assert command("--requirements", json.dumps(latent), "--batch", "decode:1x4", "--scale", "0.1").exists()


@pytest.fixture
def judged(command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Return ``judged(*changes, parts, layer, **spec)``: judge a reference with changes; the exit code and the JSON."""

    def call(*changes: tuple[str, str], parts: str = "", layer: dict[str, Any] = LAYER, **spec: Any) -> tuple[int, Any]:
        folder = command("--requirements", json.dumps(layer))
        definition = definitions_of(Requirements.from_dict(layer))[-1]
        text = definition.reference
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        if parts:
            monkeypatch.setenv("PYTEST_ADDOPTS", f"-k '{parts}'")
        capsys.readouterr()
        words = ["--solution", str(write_solution(folder, definition, text, **spec)), "--trust", "--device", "cpu"]
        code = check(*words, "--json")
        return code, json.loads(capsys.readouterr().out)

    return call


def check(*words: str) -> int:
    parser = argparse.ArgumentParser()
    check_command.add_arguments(parser)
    return check_command.run(parser.parse_args(words))


def write_solution(folder: Path, definition: Definition, text: str, **changes: Any) -> Path:
    """Write a solution into a data set."""
    spec = {"language": "python", "target_hardware": ["cpu"], "entry_point": "main.py::run"}
    spec |= {"destination_passing_style": False, **changes}
    sources = [{"path": spec.pop("path", "main.py"), "content": text}]
    path = folder / "solutions" / "someone" / definition.op_type / definition.name / "mine.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"name": "mine", "definition": definition.name, "author": "someone", "spec": spec, "sources": sources}
    path.write_text(json.dumps(data))
    return path


DESTINATION = (
    "\n\ndef into(*given):\n    for out, result in zip(given[-2:], run(*given[:-2])):\n        out.copy_(result)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["decode", "prefill"])
def test_a_right_solution_passes_the_whole_kit(judged, stage: str) -> None:
    layer = {**LAYER, "sinks": True, "logits_soft_cap": 30.0, "phases": [stage]}

    code, found = judged(layer=layer)

    assert (code, found["passed"], found["failed"]) == (0, True, [])
    assert found["kit_tests"]["ran"] == found["kit_tests"]["of"] > 100


@pytest.mark.parametrize(
    "fields",
    [
        {"phases": ["decode"]},
        {"paged": False, "block_size": None},
        {"latent": True, "head_size": 80, "head_size_v": 64, "num_kv_heads": 1},
    ],
)
def test_a_part_of_the_kit_is_no_pass(judged, fields: dict[str, Any]) -> None:
    layer = {name: value for name, value in {**LAYER, **fields}.items() if value is not None}

    code, found = judged(
        ("import torch", "import torch" + DESTINATION),
        layer=layer,
        parts="TestBasic",
        entry_point="main.py::into",
        destination_passing_style=True,
    )

    assert (code, found["passed"], found["failed"]) == (1, False, [])
    assert 5 < found["kit_tests"]["ran"] < found["kit_tests"]["of"]


@pytest.mark.parametrize(
    ("old", "new", "parts", "message"),
    [
        ("scores = sm_scale *", "scores = 0.25 *", "test_input_is_used", "another value of scale does not change"),
        ("hidden = distance < 0", "hidden = distance < -1", "test_prefills_alone", "elements differ"),
        ("total / math.log(2.0)", "total", "TestLogSumExp", "lse: "),
        (
            "float()\n    return output, lse",
            "float()\n    return output",
            "test_one_token",
            "main.py::run returned tuple",
        ),
    ],
)
def test_a_wrong_solution_is_found(judged, old: str, new: str, parts: str, message: str) -> None:
    code, found = judged((old, new), parts=parts)

    assert code == 1
    assert any(message in text for text in found["failed"]), found["failed"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": "../main.py", "entry_point": "../main.py::run"}, "a source is a text file inside"),
        ({"path": "/tmp/main.py", "entry_point": "/tmp/main.py::run"}, "a source is a text file inside"),  # noqa: S108
        ({"path": "//main.py", "entry_point": "//main.py::run"}, "a source is a text file inside"),
        ({"path": "plugin.py", "entry_point": "plugin.py::run"}, "and none of definition.json"),
        ({"entry_point": "main.py::walk"}, "name a function at the top level"),
        ({"entry_point": "other.py::run"}, "the sources are main.py"),
        ({"entry_point": "main.py"}, "it is FILE.py::FUNCTION"),
        ({"language": "cuda"}, "written in 'cuda'"),
        ({"language": "cpp"}, "written in 'cpp'"),
        ({"language": "triton"}, "it runs on a CUDA device"),
    ],
)
def test_a_solution_that_cannot_be_judged_is_refused(command, changes: dict[str, Any], message: str) -> None:
    folder = command("--requirements", json.dumps(LAYER))
    definition = definitions_of(Requirements(**LAYER))[-1]
    path = write_solution(folder, definition, definition.reference, **changes)

    with pytest.raises(RequestError, match=message):
        check("--solution", str(path), "--trust", "--device", "cpu")


def test_two_sources_with_one_path_are_refused(command) -> None:
    folder = command("--requirements", json.dumps(LAYER))
    definition = definitions_of(Requirements(**LAYER))[-1]
    path = write_solution(folder, definition, definition.reference)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "sources": data["sources"] * 2}))

    with pytest.raises(RequestError, match=r"the source 'main\.py'"):
        check("--solution", str(path), "--trust")


@pytest.mark.parametrize("words", [("elsewhere",), ("--evidence", "torch")])
def test_a_solution_is_judged_alone(words: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="--solution was given with a path or --evidence"):
        check("--solution", "mine.json", *words)


def test_no_code_of_a_solution_runs_without_trust(command, tmp_path: Path) -> None:
    folder, witness = command("--requirements", json.dumps(LAYER)), tmp_path / "ran"
    definition = definitions_of(Requirements(**LAYER))[-1]
    path = write_solution(folder, definition, f"open({str(witness)!r}, 'w')\n{definition.reference}")

    with pytest.raises(RequestError, match="foreign code"):
        check("--solution", str(path))

    assert not witness.exists()


def test_a_definition_is_found_or_named(command, tmp_path: Path) -> None:
    folder = command("--requirements", json.dumps(LAYER))
    definition = definitions_of(Requirements(**LAYER))[-1]
    path = write_solution(folder, definition, definition.reference)
    elsewhere = (folder / definition.path).rename(tmp_path / "elsewhere.json")

    with pytest.raises(RequestError, match="is not found"):
        check("--solution", str(path), "--trust")
    with pytest.raises(RequestError, match="without --trust"):
        check("--solution", str(path), "--definition", str(elsewhere))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"op_type": "gemm"}, "op_type=gemm"),
        ({"axes": {"num_qo_heads": {"type": "const", "value": 4}}}, "cannot be judged"),
        ({"inputs": {"x": {"shape": None, "dtype": "float32"}}}, "cannot be judged"),
        ({"outputs": {"lse": {"shape": None, "dtype": "float32"}}}, "cannot be judged: output"),
        ({"inputs": 3}, "cannot be read"),
    ],
)
def test_a_definition_of_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps({**definitions_of(Requirements(**LAYER))[-1].to_dict(), **changes}))

    with pytest.raises(RequestError, match=message):
        read_definition(file)


def test_windows_are_exported_and_not_judged(tmp_path: Path) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps(definitions_of(Requirements(**LAYER, sliding_window=7))[-1].to_dict()))

    with pytest.raises(RequestError, match="cannot be judged: sliding_window"):
        read_definition(file)
