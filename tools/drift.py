"""
Tests the newest release of each host and library on the package index: ``python -m tools.drift [NAME ...]``.

Each has an environment apart below build/drift, over the one that this runs in. Results are kept in
``tools/drift.json``, and docs/reference/compatibility.md has a table of them. The exit status is 1 if a declared range
admits a release that failed. The signatures of a new kernel library are left beside those of older ones.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import asdict, evolve, frozen
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from tools.compatibility import DRIFT, distributions, written

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).parents[1]
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_FOLDER: Final = Path("build", "drift")
_LONGEST: Final = 3600  # seconds of a command
_FAST: Final = "not slow and not exhaustive and not gpu and not needs_engine"


@frozen
class Target:
    """
    One row: a distribution, or a range of its releases.

    Attributes:
        distribution: Its name on the index.
        releases: The releases that count; empty for all.
        tests: What pytest runs with the release installed, beside ``attnplug doctor --load``.
        signatures: The tests of a plugin that records a wheel's signatures, without importing or installing it.
        engine: The host whose environment ``make test-hosts`` makes; `tests` run in it.
    """

    distribution: str
    releases: str = ""
    tests: tuple[str, ...] = ()
    signatures: str = ""
    engine: str = ""

    @property
    def name(self) -> str:
        """How it is named on the command line and in the table."""
        return f"{self.distribution}{self.releases}"


def _of_host(host: str, *names: str) -> tuple[str, ...]:
    return tuple(f"hosts/{host}/tests/test_{name}.py" for name in names)


TARGETS: Final = (
    Target("transformers", tests=("hosts/transformers/tests",)),
    Target("diffusers", tests=("hosts/diffusers/tests",)),
    *(Target("torch", f"=={minor}.*", tests=("hosts/torch/tests",)) for minor in ("2.13", "2.14", "2.15")),
    Target("triton", tests=("plugins/blocksparse/tests", "plugins/int8_ixformer/tests", "plugins/triton/tests")),
    Target("vllm", engine="vllm", tests=_of_host("vllm", "members", "registration", "report", "selector", "versions")),
    Target(
        "sglang", engine="sglang", tests=_of_host("sglang", "arguments", "members", "names", "registration", "report")
    ),
    Target("flashinfer-python", signatures="plugins/flashinfer/tests"),
    Target("flash-attn-4", signatures="plugins/flash_attn/tests"),
    Target("sgl-flash-mla", signatures="plugins/flashmla/tests"),
)


@frozen
class Row:
    """
    A row of the table.

    Attributes:
        distribution: The name of its target.
        newest: The newest release on the index; empty if it was not looked up.
        tested: The release that was tested; empty if none was.
        verdict: ``passed``, ``failed`` or ``not run``, with numbers or a reason.
        date: The day of the verdict.
    """

    distribution: str
    newest: str = ""
    tested: str = ""
    verdict: str = NOT_RUN
    date: str = ""


def newest(listing: str, releases: str = "") -> str:
    """
    Return the newest release in the output of ``pip index versions``; a pre-release only where there is no other.

    Raises:
        LookupError: There is none.
    """
    found = re.search(r"^Available versions: (.+)$", listing, re.MULTILINE)
    versions = [Version(each) for each in found[1].split(", ")] if found else []
    admitted = sorted(SpecifierSet(releases).filter(versions, prereleases=True))
    if not admitted:
        raise LookupError(f"the index has no release {releases or 'at all'}")
    return str(([each for each in admitted if not each.is_prerelease] or admitted)[-1])


def verdict_of(output: str, status: int) -> str:
    """Return the verdict of a run of pytest: the number that passed, or what failed first."""
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
    passed = re.search(r"(\d+) passed", output)
    if status == 0 and passed:
        return f"{PASSED} ({passed[1]} tests)"
    if not failed:
        lines = output.strip().splitlines() or ["no output"]
        return f"{FAILED}: status {status}, {lines[-1][:100]}"
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    return f"{FAILED}: {failed[0]}{more}"


def ranges(root: Path) -> Mapping[str, list[Requirement]]:
    """Return what the workspace requires of each distribution."""
    found: dict[str, list[Requirement]] = {}
    for one in distributions(root):
        variants = [each for manifest in one.manifests for each in manifest.get("variants", {}).values()]
        of_variants = [Requirement(text) for variant in variants for text in variant.get("requires", ())]
        for each in (*one.requires, *one.engine(), *of_variants):
            found.setdefault(canonicalize_name(each.name), []).append(each)
    return found


def faults(rows: Iterable[Row], declared: Mapping[str, Sequence[Requirement]]) -> Iterator[str]:
    """Yield a line for each release that failed and that a declared range admits."""
    for row in rows:
        if not row.verdict.startswith(FAILED):
            continue
        name = Requirement(row.distribution).name
        admitting = (each for each in declared.get(canonicalize_name(name), ()) if _admits(each, row.tested))
        for text in dict.fromkeys(map(written, admitting)):
            yield f"{name} {row.tested} {row.verdict}, and `{text}` admits it"


def _admits(requirement: Requirement, release: str) -> bool:
    return requirement.specifier.contains(release, prereleases=True)


def recorded(root: Path = ROOT) -> list[Row]:
    """Return the rows of the last runs, one for each target."""
    path = root / DRIFT
    rows = [Row(**each) for each in json.loads(path.read_text("utf-8"))] if path.exists() else []
    found = {row.distribution: row for row in rows}
    return [found.get(target.name, Row(target.name)) for target in TARGETS]


def examine(target: Target, root: Path = ROOT) -> Row:
    """Test the newest release of a target, and return its row. What cannot be installed is not run."""
    row = Row(target.name, date=dt.datetime.now(dt.timezone.utc).date().isoformat())
    try:
        release = newest(_run(["-m", "pip", "index", "versions", "--pre", target.distribution])[0], target.releases)
    except LookupError as error:
        return evolve(row, verdict=f"{NOT_RUN}: {error}")
    row = evolve(row, newest=release)
    try:
        verdict = _verdict(target, release, root)
    except subprocess.CalledProcessError as error:
        lines = (error.output or "").strip().splitlines() or [str(error)]
        return evolve(row, verdict=f"{NOT_RUN}: {lines[-1][:160]}")
    except (LookupError, subprocess.TimeoutExpired) as error:
        return evolve(row, verdict=f"{NOT_RUN}: {error}")
    return evolve(row, tested=release, verdict=verdict)


def _verdict(target: Target, release: str, root: Path) -> str:
    if target.signatures:
        _record(target, release, root)
        return verdict_of(*_run(["-m", "pytest", "-q", f"{target.signatures}/test_drift.py"], root))
    python, path = _engine(target, release, root) if target.engine else (_environment(target, release, root), "")
    verdict = verdict_of(*_run(["-m", "pytest", "-q", "-m", _FAST, *target.tests], root, python, path))
    output, status = _run(["-m", "attnplug", "doctor", "--load"], root, python, path)
    if status and not verdict.startswith(FAILED):
        return f"{FAILED}: attnplug doctor --load, {output.strip().splitlines()[-1][:100]}"
    return verdict


def _environment(target: Target, release: str, root: Path) -> str:
    """Make an environment with a release, over the packages of this one, and return its interpreter."""
    folder = root / _FOLDER / f"{target.distribution}-{release}"
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        _check(["-m", "venv", "--clear", str(folder)])
        (packages,) = folder.glob("lib/python*/site-packages")
        below = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages / "_below.pth").write_text(below, encoding="utf-8")
        _check(["-m", "pip", "install", "--quiet", "--no-compile", f"{target.distribution}=={release}"], str(python))
        (folder / ".ready").touch()
    return str(python)


def _engine(target: Target, release: str, root: Path) -> tuple[str, str]:
    """Return the interpreter of a host's environment, and the folder of the release in it."""
    cache = root / os.environ.get("HOSTS_CACHE", ".venv-hosts")
    for ready in sorted(cache.glob(f"{target.engine}-*/.ready")):
        python, overlay = ready.parent / "bin" / "python", ready.parent / "overlays" / release
        if overlay.is_dir():
            return str(python), str(overlay)
        program = f"from importlib.metadata import version; print(version({target.distribution!r}))"
        if _run(["-c", program], root, str(python))[0].strip() == release:
            return str(python), ""
    raise LookupError(f"no environment of `make test-hosts` has {target.distribution} {release}")


def _record(target: Target, release: str, root: Path) -> None:
    """Download a wheel, and record its signatures beside the others."""
    folder = root / _FOLDER / f"{target.distribution}-{release}"
    download = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    _check([*download, f"{target.distribution}=={release}"])
    (wheel,) = folder.glob("*.whl")
    program = str(root / target.signatures / "record_signatures.py")
    if target.distribution != "flash-attn-4":
        _check([program, str(wheel)])
        return
    with zipfile.ZipFile(wheel) as opened:
        _check([program, f"{target.distribution}-{release}", opened.extract("flash_attn/cute/interface.py", folder)])


def _run(arguments: Sequence[str], root: Path = ROOT, python: str = sys.executable, path: str = "") -> tuple[str, int]:
    """Run Python with the sources of this workspace, and return its output and status."""
    sources = [str(each) for place in ("*", "hosts/*", "plugins/*") for each in sorted(root.glob(f"{place}/src"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*filter(None, [path]), *sources])}
    done = subprocess.run(  # noqa: S603 - an interpreter of ours
        [python, *arguments], cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=_LONGEST, check=False,
    )  # fmt: skip
    return done.stdout, done.returncode


def _check(arguments: Sequence[str], python: str = sys.executable) -> None:
    output, status = _run(arguments, python=python)
    if status:
        raise subprocess.CalledProcessError(status, arguments, output)


def main(names: Sequence[str], root: Path = ROOT) -> int:
    """Test the named targets or all, keep and print the rows, and return the exit status."""
    known = [target.name for target in TARGETS]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no such target: {', '.join(unknown)}; there are {', '.join(known)}")
        return 2
    for target in TARGETS:
        if not names or target.name in names:
            row = examine(target, root)
            rows = [row if each.distribution == row.distribution else each for each in recorded(root)]
            text = json.dumps([asdict(each) for each in rows], indent=2)
            (root / DRIFT).write_text(f"{text}\n", encoding="utf-8")
            print(f"{row.distribution}: newest {row.newest or '?'}, {row.verdict}", flush=True)
    found = list(faults(recorded(root), ranges(root)))
    print("\n".join(found) or "no declared range admits a release that failed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
