"""
Runs the conformance kit again for every variant whose evidence is shipped for this device, and writes the files anew.

    python -m tools.renew_evidence [BACKEND/VARIANT ...] [--jobs 3] [--processes 4] [--out DIR]
    python -m tools.renew_evidence --place DIR

A file is written only if its run passed. Without names these are the variants that have a file for such a device.
With ``--out`` the files go to one folder, ``BACKEND-VARIANT-DEVICE.json``: of a machine whose tree is not kept. There
``--place`` moves them to the distributions, on another machine.

Each process has one thread for the oracle on the CPU, unless OMP_NUM_THREADS says otherwise: with one for each core,
runs beside each other wait for each other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from attnplug import Device
from attnplug.evidence import FOLDER, read_folder
from attnplug.manifest import MANIFEST, read_manifest
from attnplug_kit.check.evidence import command_of_kit, run_kit, short_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

ROOT = Path(__file__).parents[1]
PLACES = ("core/src/*/*", "plugins/*/src/*")
"""Where manifests are, below the root."""


class Target(NamedTuple):
    """One variant, its file and the open features of its runs."""

    variant: str
    file: Path
    features: tuple[str, ...] = ()

    @property
    def flat(self) -> str:
        """The name of the file in a folder of several backends."""
        return f"{self.variant.partition('/')[0]}-{self.file.name}"


def shipped(root: Path, device: Device) -> Iterator[Target]:
    """Yield the variants that have a file for a device like this one, whose file may be of another product."""
    found: dict[str, Target] = {}
    for folder in _folders(root):
        for each in read_folder(folder).evidence:
            if each.is_for(device):
                file = Path(each.origin).with_name(f"{each.id.partition('/')[2]}-{short_name(device)}.json")
                found[each.id] = Target(each.id, file, tuple(sorted(each.features)))
    yield from found.values()


def named(root: Path, names: Iterable[str], device: Device) -> Iterator[Target]:
    """
    Yield variants by name, whether they have a file or not.

    Raises:
        SystemExit: No distribution of the workspace has one of them.
    """
    known = {target.variant: target for target in shipped(root, device)}
    folders = {f"{backend}/{variant}": folder for folder in _folders(root) for backend, variant in _variants(folder)}
    for name in names:
        if name not in folders:
            sys.exit(f"no manifest of this workspace has the variant {name!r}; there are: {', '.join(sorted(folders))}")
        file = folders[name] / f"{name.partition('/')[2]}-{short_name(device)}.json"
        yield known.get(name, Target(name, file))


def renew(target: Target, out: Path | None, processes: int = 1) -> str:
    """
    Run the kit for one variant, write its file if it passed, and return the outcome in a line.

    Args:
        target: The variant.
        out: The folder for its file; None for its own place.
        processes: Of this run; more than one need pytest-xdist.
    """
    with tempfile.TemporaryDirectory() as report:
        command = command_of_kit(target.variant, report, features=target.features)
        command += ("-n", str(processes)) if processes > 1 else ()
        run = run_kit(command, Path(report), {"OMP_NUM_THREADS": "1", **os.environ})
    if not run.passed:
        return "\n  ".join((f"{target.variant}: not renewed: {run.last}", *run.failed))
    file = target.file if out is None else out / target.flat
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(run.evidence, indent=2) + "\n", encoding="utf-8")
    return f"{target.variant}: {file}: {run.last}"


def place(root: Path, folder: Path) -> Iterator[Path]:
    """Write the files of a folder to their distributions, and yield where."""
    folders = {f"{backend}/{variant}": place for place in _folders(root) for backend, variant in _variants(place)}
    for each in read_folder(folder).evidence:
        source = Path(each.origin)
        target = folders[each.id] / source.name.removeprefix(f"{each.id.partition('/')[0]}-")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        yield target


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="tools.renew_evidence", description="renew the evidence of this device")
    parser.add_argument("names", nargs="*", metavar="BACKEND/VARIANT", help="default: all with a file for this device")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--processes", type=int, default=1, help="processes of each run; they need pytest-xdist")
    parser.add_argument("--out", type=Path, help="write the files to this folder")
    parser.add_argument(
        "--place", type=Path, metavar="DIR", help="only move the files of a folder to the distributions"
    )
    options = parser.parse_args(arguments)
    if options.place is not None:
        _say(*map(str, place(ROOT, options.place)))
        return 0
    device = Device.current()
    targets = [*(named(ROOT, options.names, device) if options.names else shipped(ROOT, device))]
    with ThreadPoolExecutor(options.jobs) as pool:
        outcomes = [pool.submit(renew, target, options.out, options.processes) for target in targets]
        for outcome in outcomes:
            _say(outcome.result())
    return int(any(": not renewed" in outcome.result() for outcome in outcomes))


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _folders(root: Path) -> Iterator[Path]:
    for pattern in PLACES:
        yield from (file.parent / FOLDER for file in sorted(root.glob(f"{pattern}/{MANIFEST}")))


def _variants(folder: Path) -> Iterator[tuple[str, str]]:
    manifest = read_manifest(folder.parent / MANIFEST)
    yield from ((manifest.name, variant.name) for variant in manifest.variants)


if __name__ == "__main__":
    sys.exit(main())
