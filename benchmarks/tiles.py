"""
Write measured tile sizes into the table of the plugin triton.

    python benchmarks/tiles.py DIR/tiles.json ...

The files are those of ``paged.py --tiles``. For each key, an `attnplug_triton.tiles.TileKey`, the tile sizes with the
least geometric mean of times over all its steps replace the key's row. Then each row is compiled, which needs no GPU: a
row that does not fit its device leaves the table as it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnplug_triton.tiles import TABLE

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Row = dict[str, Any]

ROOT = Path(__file__).parents[1]


def main() -> int:
    """Write the table, and compile its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="tiles.json of benchmarks/paged.py")
    options = parser.parse_args()
    tried = [row for file in options.files for row in json.loads(file.read_text(encoding="utf-8"))]
    before = TABLE.read_text(encoding="utf-8")
    TABLE.write_text(written(merged(json.loads(before)["rows"], fastest(tried))), encoding="utf-8")
    tests = [str(ROOT / "plugins/triton/tests/test_compile.py"), "-k", "measured", "-p", "no:randomly"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT, check=False)  # noqa: S603 - a test here
    if done.returncode:
        TABLE.write_text(before, encoding="utf-8")
    return done.returncode


def fastest(tried: Iterable[Row]) -> list[Row]:
    """Return a row of the table for each key: the tile sizes with the least time over all steps of the key."""
    keys: dict[str, list[Row]] = {}
    for row in tried:
        keys.setdefault(json.dumps(row["key"]), []).append(row)
    return [_fastest(rows) for rows in keys.values()]


def _fastest(rows: Sequence[Row]) -> Row:
    steps = {row["step"] for row in rows}
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        times.setdefault(json.dumps(row["tiles"]), {})[row["step"]] = row["seconds"]
    means = {tiles: prod(found.values()) for tiles, found in times.items() if found.keys() == steps}
    if not means:
        message = f"no tile sizes were measured in every step of {rows[0]['key']}"
        raise SystemExit(message)
    best = min(means, key=means.__getitem__)
    return {"key": rows[0]["key"], "tiles": json.loads(best), **{name: rows[0][name] for name in ("device", "triton")}}


def merged(rows: Iterable[Row], newer: Iterable[Row]) -> list[Row]:
    """Return rows in order, with newer ones in place of those of equal keys."""
    found = {json.dumps(row["key"], sort_keys=True): row for row in (*rows, *newer)}
    return [found[key] for key in sorted(found)]


def written(rows: Iterable[Row]) -> str:
    """Return the table, a row in a line."""
    return '{"rows": [\n' + ",\n".join(json.dumps(row) for row in rows) + "\n]}\n"


if __name__ == "__main__":
    sys.exit(main())
