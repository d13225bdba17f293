"""Evidence for contribution: runs of the conformance kit on this machine's device, each written as one file."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug import Device, Requirements, select
from attnplug.commands import NO, OK, complain, describe_error, say, say_json, tracked
from attnplug.errors import AttnplugError, DeviceError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_COMMON: Final = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
"""The layer for which a backend is chosen where none is named."""

_MAKERS: Final = ("nvidia", "amd", "intel", "geforce", "tesla", "quadro", "instinct", "radeon")
_VARIETY: Final = re.compile(r"\d+gb|hbm\d\w*|sxm\d*|pcie|nvl|generation|laptop|gpu")
_SHOWN: Final = 5


@frozen
class KitRun:
    """
    One run of the kit in a process.

    Attributes:
        evidence: What the kit wrote; None if it did not get that far.
        failed: Each failed test, with the first line of its failure.
        last: The last line that pytest printed.
        code: The exit status.
    """

    evidence: Mapping[str, Any] | None
    failed: tuple[str, ...]
    last: str
    code: int

    @property
    def passed(self) -> bool:
        """Whether the whole kit ran, and passed."""
        return not self.code and self.evidence is not None and bool(self.evidence["passed"])


def command_of_kit(variant: str, report: str, *, device: str | None = None, features: Sequence[str] = ()) -> list[str]:
    """Return the command that runs the whole kit for a variant. It names nothing of the machine but Python."""
    plain = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "filterwarnings=default")
    subject = [f"--attn-backend={variant}", *([f"--attn-device={device}"] if device else [])]
    subject += [f"--attn-feature={name}" for name in features]
    return [sys.executable, "-m", "pytest", *plain, "--pyargs", "attnplug_kit", *subject, f"--attn-report={report}"]


def run_kit(command: Sequence[str], report: Path, environment: Mapping[str, str] | None = None) -> KitRun:
    """
    Run the kit and read its report. Where standard error is a terminal, pytest's output appears there meanwhile.

    Args:
        command: Of `command_of_kit`, with the folder of the report.
        report: That folder.
        environment: The variables of the process; None for those of this one.
    """
    last, shows = "no output", sys.stderr.isatty()
    options: dict[str, Any] = {"text": True, "errors": "replace", "env": environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as process:  # noqa: S603 - the kit
        for line in process.stdout or ():
            last = line.strip() or last
            if shows:
                complain(line.rstrip())
    evidence = next((json.loads(file.read_text("utf-8")) for file in report.glob("evidence-*.json")), None)
    tests = report / "report.json"
    reports = json.loads(tests.read_text("utf-8")) if tests.exists() else []
    failed = [test for found in reports for test in found["tests"] if test["outcome"] == "failed"]
    texts = (f"{test['id'].rpartition('::')[2]}: {test['message']}" for test in failed)
    return KitRun(evidence, tuple(texts), last, process.returncode)


def write_evidence(name: str, device: str | None, features: Sequence[str], folder: Path, *, as_json: bool) -> int:
    """
    Run the kit for each variant of a backend that runs here, write the file of each that passed, and say where.

    A failed run has no file: it would verify nothing, and `attnplug check` would report it in a plugin.

    Args:
        name: ``backend`` or ``backend/variant``; empty for the backend that a common layer gets here.
        device: The device, one of this machine; None for the first.
        features: The open features of every request.
        folder: Where the files go.
        as_json: Whether to print JSON.

    Raises:
        UnknownBackendError: The backend is not installed, or runs no variant here.
        RequestError: The device is not on this machine, the features are invalid, or the folder cannot be written.
    """
    from attnplug_kit.conformance.tier import plan_run  # noqa: PLC0415 - imports torch

    here = _device_here(device)
    plan = plan_run(name or select(_COMMON, here).id, here, features)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"the folder {str(folder)!r} cannot be made: {error.strerror}", "", "name another") from None
    written, errors = [], []
    for subject in tracked(plan.subjects, lambda subject: f"conformance kit: {subject}"):
        with TemporaryDirectory() as report:
            chosen = "cpu" if device == "cpu" else None
            run = run_kit(command_of_kit(subject.id, report, device=chosen, features=subject.features), Path(report))
        if run.passed and run.evidence is not None:
            written.append(_write(folder, run.evidence, here))
        else:
            errors.append(_failure(subject.id, run))
    if as_json:
        say_json({"evidence": written, "errors": [describe_error(error) for error in errors]})
    for line in () if as_json else _lines(written):
        say(line)
    for failure in errors:
        complain(f"attnplug: {failure}")
    return NO if errors else OK


def short_name(device: Device) -> str:
    """Return a device in the name of a file: ``cpu``, or the model, as ``h200``, ``l40s`` or ``rtx-4090``."""
    words = re.split(r"[^a-z0-9]+", (device.name or device.type).lower())
    kept: list[str] = []
    for word in (word for word in words if word and word not in _MAKERS):
        if _VARIETY.fullmatch(word):
            break
        kept.append(word)
    return device.type if device.type == "cpu" else "-".join(kept) or device.type


def _device_here(text: str | None) -> Device:
    """Return the device, which has to be here: the kit computes."""
    here = Device.current()
    if text in (None, here.type):
        return here
    if text == "cpu":
        return Device.cpu()
    named = None if text == "cuda" else Device.parse(text)  # no GPU is here: one without a capability does not parse
    if named is not None and (named.type, named.compute_capability) == (here.type, here.compute_capability):
        return here
    raise DeviceError(
        f"the device {text!r} is not on this machine",
        f"the conformance kit computes on a device of this machine: {', '.join(dict.fromkeys((str(here), 'cpu')))}",
        "run the command on a machine that has the device, or leave --device out",
    )


def _write(folder: Path, evidence: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """Write one file, named as `tools.renew_evidence --place` takes it, and return what is said about it."""
    backend, _, variant = str(evidence["backend"]).partition("/")
    place = f"{variant}-{short_name(device)}.json"
    file = folder / f"{backend}-{place}"
    file.write_text(json.dumps(evidence, indent=2) + "\n", encoding="utf-8")
    kept = {name: evidence[name] for name in ("backend", "device", "versions", "command", "kit_tests")}
    return {"file": str(file), "contribute_as": f"evidence/{place}", **kept}


def _lines(written: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for each in written:
        backend, device = each["backend"], each["device"].get("name") or each["device"]["type"]
        yield f"{each['file']}: {backend} passed all {each['kit_tests']['ran']} tests of the kit on {device}"
        manifest = f"the manifest of {backend.partition('/')[0]}"
        yield f"to contribute it, move it to {each['contribute_as']} beside {manifest}; CONTRIBUTING.md says more"


def _failure(variant: str, run: KitRun) -> AttnplugError:
    """Return why a run has no file."""
    one = f"pytest --pyargs attnplug_kit --attn-backend={variant}"
    if run.failed:
        more = f"; and {len(run.failed) - _SHOWN} more" if len(run.failed) > _SHOWN else ""
        problem = f"{variant} failed the conformance kit here, so nothing was written: {run.last}"
        expected = f"every test passes; failed: {'; '.join(run.failed[:_SHOWN])}{more}"
        return AttnplugError(problem, expected, f"see the whole report with `{one}`, and open an issue with it")
    if run.evidence is not None and run.evidence["kit_tests"]["ran"] < run.evidence["kit_tests"]["of"]:
        ran = "{ran} of {of}".format(**run.evidence["kit_tests"])
        problem = f"only a part of the kit ran for {variant} ({ran} tests), so nothing was written"
        return AttnplugError(problem, "evidence is a run of the whole kit", "unset PYTEST_ADDOPTS, and repeat it")
    missing = run.evidence["missing"] if run.evidence is not None else ()
    if missing:
        values = ", ".join(f"{item['field']}={item['value']}" for item in missing[:_SHOWN])
        problem = f"{variant} did not serve every value that it declares, so nothing was written: {values}"
        return AttnplugError(problem, "each declared value is served by a test that passes", f"see `{one}`")
    problem = f"the conformance kit did not run for {variant}, so nothing was written: {run.last}"
    return AttnplugError(problem, "pytest collects and runs it", f"repeat `{one}`, and mend what it reports")
