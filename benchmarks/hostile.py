"""
The time of the first `select` and of ``attnplug list`` with many distributions, and with a hostile one among them.

    python benchmarks/hostile.py [--repeats 15] [--cpu]

Each sample is a fresh process, in turn with those of the other rows; the times are medians and quartiles, in
milliseconds, after the imports. Aim: 100 ms each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    Spoil = Callable[[Path, Path], None]  # (folder of the metadata, manifest)

SELECT: Final = """\
from time import CLOCK
from attnplug import Device, Requirements, select
requirements = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
import attnplug.discovery.registry, attnplug.selection.select
start = CLOCK()
select(requirements, Device.cpu())
print(CLOCK() - start)
"""
LIST: Final = """\
import io, sys
from contextlib import redirect_stdout
from time import CLOCK
import attnplug.cli.list
from attnplug.cli.main import main
start = CLOCK()
with redirect_stdout(io.StringIO()):
    main(["list", "--json"])
print(CLOCK() - start)
"""
MANIFEST: Final = """\
api = "1.0"
backend = {{ name = "{name}", summary = "made for a benchmark" }}
[supports]
device_type = ["cpu", "cuda"]
dtype = ["bfloat16", "float16"]
head_size = {{ multiple_of = 8, max = 256 }}
block_size = {{ multiple_of = 16 }}
features = ["paged", "sliding_window"]
[[rules]]
when = {{ sliding_window = true }}
need = {{ head_size = {{ max = 128 }} }}
because = "made up"
"""
EVIL: Final = MANIFEST.format(name="evil")
LEFT: Final = 2**16 - len(EVIL) - 100  # the characters that a manifest has left
IN_A_LINE: Final = '{when={sinks=true},because="x"},'


def write_plugin(site: Path, name: str) -> tuple[Path, Path]:
    """Write a plugin; return the folder of its metadata, and its manifest."""
    package = site / f"made_up_{name}"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "attnplug.toml").write_text(MANIFEST.format(name=name))
    info = write_neighbor(site, f"made-up-{name}")
    (info / "entry_points.txt").write_text(f"[attnplug.backends]\n{name} = made_up_{name}.plugin\n")
    return info, package / "attnplug.toml"


def write_neighbor(site: Path, name: str) -> Path:
    """Write the metadata of a distribution that is no plugin; return its folder."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n\n{'text ' * 500}")
    (info / "entry_points.txt").write_text(f"[console_scripts]\n{name} = module:main\n")
    return info


def sparse(path: Path) -> None:
    """Make a file of 50 MB."""
    path.unlink(missing_ok=True)
    with path.open("wb") as file:
        file.truncate(50 * 2**20)


def fifo(path: Path) -> None:
    """Make a FIFO in place of a file."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def says(text: str) -> Spoil:
    """Return what makes this the manifest."""
    return lambda _, manifest: manifest.write_text(text) and None


def points(text: str) -> Spoil:
    """Return what makes these the entry points."""
    return lambda info, _: (info / "entry_points.txt").write_text(text) and None


HOSTILE: Final[dict[str, Spoil]] = {
    "manifest is a FIFO": lambda _, manifest: fifo(manifest),
    "entry points are a FIFO": lambda info, _: fifo(info / "entry_points.txt"),
    "METADATA is a FIFO": lambda info, _: fifo(info / "METADATA"),
    "manifest of 50 MB": lambda _, manifest: sparse(manifest),
    "entry points of 50 MB": lambda info, _: sparse(info / "entry_points.txt"),
    "METADATA of 50 MB": lambda info, _: sparse(info / "METADATA"),
    "20,000 backends": points("[attnplug.backends]\n" + "".join(f"b{i} = m{i}.plugin\n" for i in range(20_000))),
    "20,000 scripts": points("[console_scripts]\n" + "".join(f"s{i} = m{i}:main\n" for i in range(20_000))),
    "10,000 backends": points("[attnplug.backends]\n" + "".join(f"b{i} = m{i}.plugin\n" for i in range(10_000))),
    "256 KiB of scripts": points("[console_scripts]\n" + "a=b\n" * (2**16 - 10)),
    "256 KiB of odd lines": points("[console_scripts]\n" + "".join(f"{i}\n" for i in range(37_000))),
    "blanks after a bracket": says(f"{EVIL}odd = [\n[{' ' * LEFT}\n]]\n"),
    "a deep key": says(f"{EVIL}a{'.a' * (LEFT // 2 - 10)} = 1\n"),
    "a deep table": says(f"{EVIL}[a{'.a' * (LEFT // 2 - 10)}]\n"),
    "a deep array": says(f"{EVIL}x = {'[' * LEFT}\n"),
    "many keys": says(EVIL + "".join(f"k{i} = 1\n" for i in range(LEFT // 11))),
    "many rules": says(EVIL + '[[rules]]\nwhen={sinks=true}\nbecause="x"\n' * (LEFT // 42)),
    "rules in a line": says(
        EVIL.partition("[[rules]]")[0].replace("[supports]", f"rules = [{IN_A_LINE * (LEFT // 34)}]\n[supports]")
    ),
    "100 variants": says(EVIL + "".join(f"[variants.v{i}]\n" for i in range(100))),
    "large numbers": says(f"{EVIL}logits_soft_cap = {'9' * 4000}\n"),
}


def make_site(folder: Path, *, plugins: int, neighbors: int, spoil: Spoil | None = None) -> Path:
    """Write distributions, one of them spoiled."""
    folder.mkdir()
    for number in range(plugins):
        write_plugin(folder, f"p{number}")
    for number in range(neighbors):
        write_neighbor(folder, f"neighbor-{number}")
    if spoil is not None:
        spoil(*write_plugin(folder, "evil"))
    return folder


def sample(site: Path, code: str) -> float:
    """Return the milliseconds that a fresh process prints."""
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    own = {name: value for name, value in os.environ.items() if not name.startswith("ATTNPLUG_")}
    environment = {**own, "PYTHONPATH": path, "XDG_CONFIG_HOME": str(site)}
    done = subprocess.run(  # noqa: S603 - this interpreter, and the code above
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    return 1000 * float(done.stdout)


def main() -> None:
    """Measure every row, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15, help="processes of each row")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--cpu", action="store_true", help="processor time, for a machine that others use")
    arguments = parser.parse_args()
    clock = "process_time" if arguments.cpu else "perf_counter"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        sites = {
            "nothing more": make_site(folder / "none", plugins=0, neighbors=0),
            "300 distributions, 5 of them plugins": make_site(folder / "many", plugins=5, neighbors=295),
            **{
                f"the same, and {name}": make_site(folder / f"s{number}", plugins=5, neighbors=295, spoil=spoil)
                for number, (name, spoil) in enumerate(HOSTILE.items())
            },
        }
        found: dict[str, list[list[float]]] = {name: [[], []] for name in sites}
        for turn in range(arguments.repeats + 1):
            for name, site in sites.items():
                for column, code in enumerate((SELECT, LIST)):
                    milliseconds = sample(site, code.replace("CLOCK", clock))
                    if turn:  # the first turn fills the page cache
                        found[name][column].append(milliseconds)
    if arguments.json:
        print(json.dumps(found))
        return
    print(f"{'beside what is installed':62}{'first select':>22}{'list':>22}")
    for name, columns in found.items():
        texts = []
        for samples in columns:
            low, middle, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else samples * 3
            texts.append(f"{middle:.1f} ({low:.1f}-{high:.1f})")
        print(f"{name:62}{texts[0]:>22}{texts[1]:>22}")


if __name__ == "__main__":
    main()
