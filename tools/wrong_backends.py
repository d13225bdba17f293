"""
Makes the table of wrong backends: what the conformance kit catches of the backends with one defect each.

    python -m tools.wrong_backends --column after            with the kit of this tree
    python -m tools.wrong_backends --column before --kit DIR with the kit and the core of another one
    python -m tools.wrong_backends NAME...                   these backends alone, again
    python -m tools.wrong_backends --write                   the page only, from what is recorded

It goes on where it was stopped: backends that are recorded are skipped, unless they are named. Those that pass both the
named test and the basic tier run the whole kit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).parents[1]
DATA: Final = ROOT / "docs/reference/evidence/wrong-backends.json"
PAGE: Final = DATA.with_suffix(".md")
WORKER: Final = "kit.tests.conformance.defects.worker"
COLUMNS: Final = ("before", "after")
LARGEST_GROUP: Final = 12
EXAMPLES: Final = "first_mistakes"
INTRODUCTION: Final = """\
# Wrong backends

Backends with one defect each, and which of them the conformance kit catches on a CPU. Written by
`python -m tools.wrong_backends`; not edited by hand. *before* is the kit of revision {before}, *after* that of {after}.
*basic*: the basic tier catches it; *kit*: any test does; *named*: the test that has to catch it does.
[The data](wrong-backends.json) has the defect of each backend, and the test that caught it.

Each ran the named test and the basic tier. Those that passed both ran the whole kit in groups: a test that several
defects pass together catches none of them. Then each ran alone what its group failed. `TestRefusals` and `TestPurity`
are left out: they read manifests and imports, which no defect changes.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, write the table, and print the counts by class."""
    options = _parser().parse_args(arguments)
    out: Path = options.out
    data = json.loads(out.read_text("utf-8")) if out.exists() else {"revisions": {}, "backends": {}}
    if not options.write:
        data["backends"] = _described(data["backends"])
        _run(data, options)
    out.with_suffix(".md").write_text(page(data), encoding="utf-8")
    print("\n".join(_counts(data)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.wrong_backends", description="wrong backends and the kit")
    parser.add_argument("names", nargs="*", help="backends that are run again")
    parser.add_argument("--kit", type=Path, default=ROOT, help="the tree whose core and kit are run; default: this one")
    parser.add_argument("--column", choices=COLUMNS, default="after", help="where results go")
    parser.add_argument("--out", type=Path, default=DATA, help="the results, beside which the page is written")
    parser.add_argument("-j", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="write the page alone")
    return parser


def _run(data: dict[str, Any], options: argparse.Namespace) -> None:
    """Run the backends that have no result in a column, and record each result as soon as it is known."""
    missing = [
        name
        for name, one in data["backends"].items()
        if (name in options.names if options.names else options.column not in one)
        and (options.column == "after" or one["class"] != "mutants")
    ]
    _record(data, missing, options)
    uncaught = [
        name
        for name, one in data["backends"].items()
        if options.column in one and not one[options.column]["kit"] and not one[options.column]["whole"]
    ]
    _record(data, _groups(uncaught, data["backends"]), options)


def _record(data: dict[str, Any], jobs: Sequence[str], options: argparse.Namespace) -> None:
    lock = Lock()

    def work(jobs: Sequence[str]) -> None:
        for row in _rows(jobs, options.kit):
            with lock:
                data["backends"][row.pop("name")][options.column] = row
                data["revisions"][options.column] = _revision(options.kit)
                options.out.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    with ThreadPoolExecutor(options.j) as pool:
        list(pool.map(work, [jobs[number :: options.j] for number in range(options.j)]))


def _groups(names: Iterable[str], backends: Mapping[str, Any]) -> list[str]:
    """Return the jobs of the whole kit: groups of one class, and the backends that hide the defects of others."""
    jobs: list[str] = []
    groups: dict[str, list[str]] = {}
    for name in names:
        if backends[name]["alone"]:
            jobs.append(f"+{name}")
        else:
            groups.setdefault(backends[name]["class"], []).append(name)
    for group in groups.values():
        jobs += [f"+{'+'.join(group[first : first + LARGEST_GROUP])}" for first in range(0, len(group), LARGEST_GROUP)]
    return jobs


def _rows(jobs: Sequence[str], kit: Path) -> Iterator[dict[str, Any]]:
    """Yield the results of one process, which runs core and kit of a tree, and the defects of this one."""
    if not jobs:
        return
    paths = [ROOT, kit.resolve() / "core/src", kit.resolve() / "kit/src"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", WORKER, folder, *jobs]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:  # noqa: S603 - this tree's own worker
            for line in process.stdout or ():
                yield json.loads(line)
        if process.returncode:
            raise SystemExit(f"the worker ended with status {process.returncode}; run again to go on")


def _described(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return every wrong backend of this tree, with the results that are recorded for it."""
    command = [sys.executable, "-m", WORKER]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)  # noqa: S603 - likewise
    return {
        name: {
            **one,
            **{column: recorded.get(name, {})[column] for column in COLUMNS if column in recorded.get(name, {})},
        }
        for name, one in found.items()
    }


def _revision(kit: Path) -> str:
    command = ("git", "-C", str(kit), "describe", "--always")
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603 - a fixed command


def page(data: Mapping[str, Any]) -> str:
    """Return the page: the counts, the defects that no test catches, and those of the first class as examples."""
    backends = sorted(data["backends"].items(), key=lambda item: (item[1]["class"], item[0]))
    revisions = {column: data["revisions"].get(column, "-") for column in COLUMNS}
    examples = (f"- {one['defect']}" for _, one in backends if one["class"] == EXAMPLES)
    uncaught = (f"- `{name}`: {one['uncaught']}." for name, one in backends if one["uncaught"])
    return "\n".join(
        [
            INTRODUCTION.format(**revisions),
            *_counts(data),
            "",
            "No test catches these:",
            "",
            *uncaught,
            "",
            "The first mistakes, as examples:",
            "",
            *examples,
            "",
        ]
    )


def _counts(data: Mapping[str, Any]) -> list[str]:
    """Return a table of how many backends of each class are caught, and by what."""
    counts: dict[str, Counter[str]] = {}
    for one in data["backends"].values():
        count = counts.setdefault(_class(one), Counter())
        count["backends"] += 1
        for column in COLUMNS:
            for what in ("basic", "kit", "named"):
                count[f"{column} {what}"] += bool(one.get(column, {}).get(what))
            count[f"{column} run"] += column in one
    head = ("class", "backends", *(f"{c} {w}" for c in COLUMNS for w in ("run", "basic", "kit")), "after named")
    total = sum(counts.values(), Counter())
    listed = [*sorted(counts.items()), ("all", total)]
    rows = ((name, *(str(count[what]) for what in head[1:])) for name, count in listed)
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows)]


def _class(one: Mapping[str, Any]) -> str:
    return str(one["class"]).replace("_", " ")


if __name__ == "__main__":
    sys.exit(main())
