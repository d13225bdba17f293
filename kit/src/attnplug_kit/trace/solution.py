"""A solution of FlashInfer Trace: reading it, writing it as a plugin, and its judgement by the conformance kit."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.commands import NO, OK, complain, say, say_json
from attnplug.errors import RequestError
from attnplug.request import Device, Requirements
from attnplug_kit.trace.definition import Definition, definitions_of

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME: Final = "trace_solution"
"""The name of the backend, and of the package that has it."""

DEFINITION: Final = "definition.json"
SOLUTION: Final = "solution.json"

_LANGUAGES: Final = ("python", "triton")
_OWN: Final = (DEFINITION, SOLUTION, "attnplug.toml", "plugin.py", "__init__.py")
_PLUGIN: Final = """\
from pathlib import Path

from attnplug.contract import hookimpl


@hookimpl
def attnplug_backend():
    from attnplug_kit.trace.adapter import backend_of

    return backend_of(Path(__file__).parent)
"""
_AXES: Final = {
    "num_qo_heads": "num_q_heads",
    "num_kv_heads": "num_kv_heads",
    "head_dim": "head_size",
    "head_dim_v": "head_size_v",
    "page_size": "block_size",
}
_SHOWN: Final = 10


@frozen
class Solution:
    """
    A solution.

    Attributes:
        name: Its name.
        definition: The name of its definition.
        language: python or triton.
        entry_point: ``FILE::FUNCTION``.
        takes_outputs: Whether the function writes outputs that it is given, behind the inputs, and returns nothing.
        sources: The text of each file, by its path.
    """

    name: str
    definition: str
    language: str
    entry_point: str
    takes_outputs: bool
    sources: Mapping[str, str] = field(repr=False)

    @classmethod
    def from_dict(cls, data: Any) -> Solution:
        """
        Read a solution, as of https://bench.flashinfer.ai.

        Raises:
            RequestError: It is of another form or language, a source is outside of the folder, or the entry point is in
                no source.
        """
        try:
            spec, sources = data["spec"], {each["path"]: each["content"] for each in data["sources"]}
            name, definition = str(data["name"]), str(data["definition"])
            language, entry_point = str(spec["language"]), str(spec["entry_point"])
            takes_outputs = bool(spec.get("destination_passing_style", True))
            found = cls(name, definition, language, entry_point, takes_outputs, sources)
            paths = [each["path"] for each in data["sources"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise RequestError(
                f"the solution cannot be read: {error!r}",
                "it has name, definition, spec (language, entry_point) and sources (path, content)",
                "write it as FlashInfer Trace describes it",
            ) from None
        if found.language not in _LANGUAGES:
            raise RequestError(
                f"the solution is written in {found.language!r}",
                f"solutions in {' and '.join(_LANGUAGES)} can be judged: nothing is compiled by a C++ compiler",
                "judge another solution, or write a plugin around its library",
            )
        for path, text in sources.items():
            if not _is_inside(path) or paths.count(path) > 1 or not isinstance(text, str):
                raise RequestError(
                    f"the solution has the source {path!r}",
                    f"a source is a text file inside of the solution's folder, once, and none of {', '.join(_OWN)}",
                    "do not run this solution, or rename the file",
                )
        place, _, function = entry_point.partition("::")
        if not place.endswith(".py") or function not in _names_in(sources.get(place, "")):
            raise RequestError(
                f"the solution has the entry point {found.entry_point!r}",
                f"it is FILE.py::FUNCTION, and the sources are {', '.join(sources)}",
                "name a function at the top level of a source",
            )
        return found


def _is_inside(path: Any) -> bool:
    """Whether a path names a file in the folder on each operating system, and no file of the plugin."""
    if not isinstance(path, str) or path.startswith("/") or {"\\", ":"} & set(path):
        return False
    return bool(parts := PurePosixPath(path).parts) and ".." not in parts and str(PurePosixPath(path)) not in _OWN


def _names_in(text: str) -> set[str]:
    """Return the names at the top level of a source, without running it."""
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return set()
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    imports = {alias.asname or alias.name for node in body if isinstance(node, ast.ImportFrom) for alias in node.names}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return functions | imports | {target.id for target in targets if isinstance(target, ast.Name)}


def read_definition(path: Path) -> Definition:
    """
    Read a definition of attention, of attnplug or of the FlashInfer Trace data set.

    Raises:
        RequestError: It is not read, or the kit has no batch for it: an axis or input is unknown.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        axes = {name: axis.get("value") for name, axis in data["axes"].items()}
        inputs, outputs = (
            {n: (None if (shape := each["shape"]) is None else tuple(shape), each["dtype"]) for n, each in part.items()}
            for part in (data["inputs"], data["outputs"])
        )
        found = Definition(data["name"], data["op_type"], axes, inputs, outputs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(
            f"the definition {str(path)!r} cannot be read: {error!r}",
            "it has name, op_type, axes, inputs and outputs",
            "pass --definition FILE",
        ) from None
    _check_definition(found)
    return found


def _check_definition(definition: Definition) -> None:
    """Compare a definition with that of its layer: each input and output is known, and none is missing."""
    try:
        (ours,) = definitions_of(layer_of(definition))
    except (RequestError, KeyError, TypeError) as error:
        wrong = [str(error)]
    else:
        optional = {"kv_last_page_len"} if definition.axes.get("page_size") == 1 else set()
        wrong = sorted(definition.inputs.keys() ^ ours.inputs.keys() - optional)
        wrong += sorted(definition.outputs.keys() - ours.outputs.keys() | {"output"} - definition.outputs.keys())
        ours_constant, constant = ({n for n, v in each.axes.items() if v is not None} for each in (ours, definition))
        wrong += sorted(constant ^ ours_constant)
        names = sorted(definition.inputs.keys() & ours.inputs.keys())
        wrong += [name for name in names if definition.inputs[name][1] != ours.inputs[name][1]]
    if wrong:
        raise RequestError(
            f"the definition {definition.name!r} cannot be judged: {', '.join(dict.fromkeys(wrong))}",
            "the kit judges gqa_paged, mla_paged and gqa_ragged, with the axes, inputs and dtypes of `attnplug trace`",
            "judge a solution of another definition",
        )


def layer_of(definition: Definition) -> Requirements:
    """Return the layer of a definition, in the one stage that it has."""
    if definition.op_type not in ("gqa_paged", "mla_paged", "gqa_ragged"):
        raise TypeError(f"op_type={definition.op_type}")
    axes, inputs, is_latent = definition.axes, definition.inputs, definition.op_type == "mla_paged"
    known: dict[str, Any] = {field: axes[name] for name, field in _AXES.items() if axes.get(name) is not None}
    if is_latent:
        size = int(axes["head_dim_ckv"] or 0)
        known |= {"head_size": size + int(axes["head_dim_kpe"] or 0), "head_size_v": size, "num_kv_heads": 1}
    paged = definition.op_type != "gqa_ragged"
    return Requirements(
        dtype=inputs["q_nope" if is_latent else "q"][1],
        latent=is_latent,
        paged=paged,
        sinks="sinks" in inputs,
        logits_soft_cap=1.0 if "logits_soft_cap" in inputs else None,
        phases=("prefill", "decode") if not paged else ("decode",) if definition.is_decode else ("prefill",),
        **known,
    )


def manifest_of(definition: Definition, language: str) -> str:
    """Return the manifest of a solution: what its definition's axes and inputs declare, and nothing else."""
    layer = layer_of(definition)
    features = ["return_lse"] if "lse" in definition.outputs else []
    features += [name for name in ("paged", "sinks", "latent") if getattr(layer, name)]
    fields = ["head_size", "num_q_heads", "num_kv_heads", *(["block_size"] if layer.paged else [])]
    fields += ["head_size_v"] if layer.head_size_v != layer.head_size else []
    rules = "".join(
        f'[[rules]]\nwhen = {{ {name} = false }}\nbecause = "the definition is of {name} attention"\n'
        for name in ("paged", "latent")
        if getattr(layer, name)
    )
    return f"""\
api = "1.0"
backend = {{ name = "{NAME}", summary = "A solution of FlashInfer Trace" }}
[supports]
device_type = {json.dumps(["cuda"] if language == "triton" else ["cpu", "cuda"])}
dtype = [{json.dumps(layer.dtype)}]
features = {json.dumps(features)}
{"" if layer.logits_soft_cap is None else "logits_soft_cap = { min = 0.5 }"}
{chr(10).join(f"{name} = [{getattr(layer, name)}]" for name in fields)}
{rules}[variants.plain]
"""


def _find_definition(path: Path, name: str) -> Path:
    """Return the file of a definition in the data set that has a solution: it is in a folder above."""
    for folder in path.resolve().parents if not {"/", "\\"} & set(name) else ():
        if found := sorted(folder.glob(f"definitions/*/{name}.json")):
            return found[0]
    raise RequestError(
        f"the definition {name!r} of {str(path)!r} is not found",
        "a data set has it as definitions/OP_TYPE/NAME.json, in a folder above the solution",
        "pass --definition FILE",
    )


def judge(file: str, definition: str | None, device: str | None, *, trusted: bool, as_json: bool) -> int:
    """
    Run the conformance kit for a solution, in a process and a folder that do not remain.

    Args:
        file: The solution.
        definition: The file of its definition; None finds it in the data set around the solution.
        device: cpu, or None for this machine's.
        trusted: Whether foreign code may run.
        as_json: Whether to print JSON.

    Returns:
        The exit status: 0 where the whole kit passed.

    Raises:
        RequestError: It is not trusted, or cannot be judged.
    """
    path = Path(file)
    try:
        solution = Solution.from_dict(data := json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise RequestError(f"--solution {file!r} cannot be read: {error}", "it is a JSON file", "correct it") from None
    place = Path(definition) if definition else _find_definition(path, solution.definition)
    found = read_definition(place)
    if found.name != solution.definition:
        raise RequestError(
            f"the solution is of {solution.definition!r}, and the definition is {found.name!r}", "", "pass its own"
        )
    if not trusted:
        raise RequestError(
            f"the solution {solution.name!r} was given without --trust",
            "to judge it, its code has to run, with the rights of this user: foreign code",
            f"read its sources ({', '.join(solution.sources)}), then pass --trust",
        )
    if solution.language == "triton" and (device == "cpu" or Device.current().type != "cuda"):
        raise RequestError(
            f"the solution {solution.name!r} is written in Triton", "it runs on a CUDA device", "judge it on a GPU"
        )
    from attnplug_kit.check.evidence import command_of_kit, run_kit  # noqa: PLC0415 - imports torch

    with TemporaryDirectory() as scratch:
        site, report = Path(scratch) / "site", Path(scratch) / "report"
        _install(site, solution, data, found, place.read_text(encoding="utf-8"))
        others = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
        paths = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
        command = command_of_kit(f"{NAME}/plain", str(report), device=device)
        run = run_kit(command, report, {**others, "PYTHONPATH": paths})
    kit_tests = run.evidence["kit_tests"] if run.evidence else {"ran": 0, "of": 0}
    if as_json:
        say_json({"solution": solution.name, "passed": run.passed, "kit_tests": kit_tests, "failed": list(run.failed)})
    elif run.passed:
        say(f"{solution.name} passed all {kit_tests['ran']} tests of the conformance kit that its definition has")
    else:
        more = [f"and {len(run.failed) - _SHOWN} more"] if len(run.failed) > _SHOWN else []
        complain("\n".join([f"{solution.name} failed the conformance kit: {run.last}", *run.failed[:_SHOWN], *more]))
    return OK if run.passed else NO


def _install(site: Path, solution: Solution, data: Any, definition: Definition, text: str) -> None:
    """Write a package with the sources, and the metadata by which it is found as a plugin."""
    package, metadata = site / NAME, site / f"{NAME}-0.dist-info"
    files = {package / path: content for path, content in solution.sources.items()}
    files |= {package / SOLUTION: json.dumps(data), package / DEFINITION: text, package / "plugin.py": _PLUGIN}
    files |= {package / "__init__.py": "", package / "attnplug.toml": manifest_of(definition, solution.language)}
    files[metadata / "METADATA"] = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n"
    files[metadata / "entry_points.txt"] = f"[attnplug.backends]\n{NAME} = {NAME}.plugin\n"
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
