"""Selecting runs no plugin code, importing a plugin has no side effects, and decisions can be serialized."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import pytest

from attnplug import Selection, registry, select
from attnplug.negotiation import Agreement
from attnplug.request import names_of_pair
from attnplug_kit.conformance.serving import plain, require
from attnplug_kit.conformance.tier import Tier

if TYPE_CHECKING:
    from pathlib import Path

    from attnplug_kit.conformance.subject import Subject

_SELECTS: Final = """
import json, sys
import attnplug
requirements, device, name, modules = json.loads(sys.argv[1])
before = set(sys.modules)
attnplug.select(attnplug.Requirements(**requirements), attnplug.Device.from_dict(device), backend=name)
print(json.dumps(sorted({"torch", *modules} & set(sys.modules) - before)))
"""
_IMPORTS: Final = """
import json, sys, threading
from importlib import import_module
for module in json.loads(sys.argv[1]):
    import_module(module)
torch = sys.modules.get("torch")
print(json.dumps([threading.active_count(), bool(torch) and torch.cuda.is_initialized()]))
"""


class Purity(Tier):
    """The life of a plugin before it computes."""

    def test_selecting_imports_nothing(self, subject: Subject) -> None:
        """Selecting neither imports the plugin's module nor torch."""
        requirements = plain(subject).requirements().to_dict()  # type: ignore[union-attr]
        found = _run(_SELECTS, [requirements, subject.device.to_dict(), subject.id, _modules(subject)])
        require(found == [], f"{subject}: selecting imported {found}; manifests are read without importing anything")

    def test_importing_has_no_side_effects(self, subject: Subject, tmp_path: Path) -> None:
        """Importing the plugin's module writes no file, starts no thread, and creates no CUDA context."""
        threads, has_context = _run(_IMPORTS, _modules(subject), cwd=tmp_path)
        written = [path.name for path in tmp_path.iterdir()]
        require(not written, f"{subject}: importing its module wrote {written}")
        require(threads == 1, f"{subject}: importing its module started {threads - 1} threads")
        require(not has_context, f"{subject}: importing its module created a CUDA context")

    def test_decisions_serialize(self, subject: Subject) -> None:
        """Selections and agreements are the same after pickle and JSON, and load the same backend."""
        selection = select(plain(subject).requirements(), subject.device, backend=subject.id)  # type: ignore[arg-type]
        for copy in (_through_pickle(selection), Selection.from_dict(_through_json(selection.to_dict()))):
            require(copy == selection, f"{subject}: a selection changed by pickle or JSON")
            require(
                copy.load().agreement == selection.agreement,
                f"{subject}: a deserialized selection loads another agreement",
            )
        agreement = selection.agreement
        for copy in (_through_pickle(agreement), Agreement.from_dict(_through_json(agreement.to_dict()))):
            require(copy == agreement, f"{subject}: an agreement changed by pickle or JSON")

    def test_threads_select_and_load(self, subject: Subject) -> None:
        """Concurrent threads that select and load get the same decision."""
        requirements = plain(subject).requirements()
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(lambda _: subject.load(requirements).selection, range(16)))  # type: ignore[arg-type]
        require(all(one == found[0] for one in found), f"{subject}: threads got different decisions")


def _modules(subject: Subject) -> list[str]:
    """Return the plugin's module, as another process finds it; of a pair both."""
    plugins = [registry().plugin(name.partition("/")[0]) for name in names_of_pair(subject.id) or (subject.id,)]
    if any(plugin.is_by_hand for plugin in plugins):
        pytest.skip(f"{subject} is registered in this process only: no other one finds it")
    return [plugin.module for plugin in plugins]


def _run(program: str, argument: object, cwd: Path | None = None) -> Any:
    command = [sys.executable, "-c", program, json.dumps(argument)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)  # noqa: S603 - this interpreter
    require(done.returncode == 0, f"a fresh process failed: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _through_json(data: object) -> Any:
    return json.loads(json.dumps(data))


def _through_pickle(data: object) -> Any:
    return pickle.loads(pickle.dumps(data))  # noqa: S301 - what was just written here
