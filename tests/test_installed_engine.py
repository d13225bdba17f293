"""An engine of an installed distribution, in a separate process."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.plugins.preamble import RunCode

RUN = """
import io
from contextlib import redirect_stdout
from attnplug.cli.main import main
def said(*words):
    with redirect_stdout(io.StringIO()) as output:
        code = main([*words, "--json"])
    return [code, json.loads(output.getvalue())]
layer = ("--head-size", "8", "--num-q-heads", "4", "--num-kv-heads", "2", "--dtype", "float32")
"""


def test_its_choice_is_beside_that_of_attnplug(run_code: RunCode) -> None:
    code = f"{RUN}print(json.dumps(said('explain', *layer, '--engine', 'acme', '--device', 'cpu', '--sinks')))"

    status, found = run_code(code, "engine", "good")

    (answer,) = found["engines"]
    (choice,) = answer["choices"]
    assert (status, answer["engine"], choice["chosen"]) == (0, "Acme 2.1", None)
    assert choice["backends"][0]["reasons"] == ["it has no sinks"]
    assert choice["attnplug"] == found["explanations"][0]["chosen"]


def test_a_broken_engine_is_listed_and_hides_no_other(run_code: RunCode) -> None:
    found = run_code(f"{RUN}print(json.dumps(said('doctor')))", "engine", "good")[1]

    listed = {each["name"]: each["lines"] for each in found["engines"] if each["name"] in ("acme", "broken")}
    assert listed == {"acme": ["Acme 2.1 is installed"], "broken": []}
    (problem,) = [each for each in found["problems"] if each["subject"] == "engine broken"]
    assert "cannot be imported: OSError: the library of this engine is gone" in problem["what"]
    assert problem["fix"] == "reinstall or remove attnplug-engine"


def test_nothing_of_it_is_imported_for_anything_else(run_code: RunCode) -> None:
    code = f"{RUN}said('explain', *layer)\nsaid('list')\nprint(json.dumps('attnplug_engine' in sys.modules))"

    assert run_code(code, "engine", "good") is False
