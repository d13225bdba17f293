"""The kit on a routed pair: the pair passes, and pairs that are routed wrongly are found."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from attrs import evolve

from attnplug.errors import UnknownBackendError
from attnplug.request import Device
from attnplug_kit.conformance.refusals import _refused
from attnplug_kit.conformance.subject import find_subjects
from kit.tests.conformance.test_mutants import require_failure
from tests.torch_pair import PAIR, offer_pair
from tools import forked

ROOT = Path(__file__).parents[3]
RUN = """
import sys
from pathlib import Path
import pytest, torch
from attnplug.contract import routed
from tests.torch_pair import PAIR, offer_pair
torch.set_num_threads(1)
folder = Path(sys.argv[1])
offer_pair(folder)
exec(sys.argv[2])
options = [f"--attn-backend={PAIR}", "--attn-device=cpu", f"--attn-report={folder}", *sys.argv[3:]]
plain = ["-p", "no:randomly", "-p", "no:cacheprovider", "-q", "--rootdir", str(folder)]
sys.exit(pytest.main(["--pyargs", "attnplug_kit", *plain, *options]))
"""
WRONG = {
    "sends mixed batches to the decodes' side": (
        """routed._is_pure_decode = lambda batch, split, graph: True""",
        ("test_mixed_batch[*]", "output: * elements differ"),
    ),
    "takes decodes of several lengths for pure ones": (
        """routed._is_pure_decode = lambda batch, split, graph: not split.num_prefills""",
        ("test_decodes_of_several_tokens[*decode_query_len=5]", "output: * elements differ"),
    ),
    "forgets that parameters have changed on one side": (
        """
def forget(self):
    self.decode.layer = self.layer
    self.decode.parameters_changed()
routed._LateImpl.parameters_changed = forget
""",
        ("test_changed_in_place[*alibi=linear]", "alibi_slopes in place: output: * elements differ"),
    ),
    "shares the metadata of one side": (
        """
def share(self, batch, split, *, fast, graph):
    fields = self.rest.plan_batch(batch, split, fast=fast, graph=graph)
    is_decode = routed._is_pure_decode(batch, split, graph)
    return routed._routed(self.rest, split, fields, graph, is_decode=is_decode)
routed.RoutedBuilder.plan_batch = share
""",
        ("test_replays[*cudagraph=uniform_batch]", "metadata of another backend was given"),
    ),
}


def run(folder: Path, wrong: str, *options: str):
    """Run the kit on the pair, with something wrong in core."""
    outside = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**outside, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = forked.run("-c", RUN, str(folder), wrong, *options, env=environment, cwd=folder)
    return done, json.loads((folder / "report.json").read_text("utf-8"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_pair_is_found(name: str, tmp_path: Path) -> None:
    wrong, expected = WRONG[name]
    _, report = run(tmp_path, wrong, "-k", expected[0].partition("[")[0])
    require_failure(expected, report["tests"])


@pytest.mark.slow
def test_a_pair_passes_the_kit(tmp_path: Path) -> None:
    done, report = run(tmp_path, "", "-m", "not slow")
    assert done.returncode == 0, done.stdout[-3000:]
    assert report["outcomes"].get("failed", 0) == 0
    assert report["outcomes"]["passed"] > 600
    assert not list(tmp_path.glob("evidence-*"))  # which is of one variant


def test_a_pair_is_tested_by_what_both_declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = offer_pair(tmp_path, monkeypatch)
    (subject,) = find_subjects("first+second", Device.cpu())

    assert (subject.id, subject.is_pair) == (pair, True)
    assert subject.supports["block_size"].first() == 16
    assert "phases" not in subject.supports  # those of the second
    with pytest.raises(UnknownBackendError, match="did you mean 'second'"):
        find_subjects("first+secnd", Device.cpu())
    assert find_subjects(f"{PAIR}", Device.cpu()) == (subject,)


def test_a_pair_refuses_only_what_it_routes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offer_pair(tmp_path, monkeypatch)
    second, pair = (find_subjects(name, Device.cpu())[0] for name in ("second", PAIR))
    without = [
        evolve(one, candidate=evolve(one.candidate, variant=evolve(one.candidate.variant, supports=supports)))
        for one in (second, pair)
        for supports in [{name: values for name, values in one.supports.items() if name != "attn_bias"}]
    ]
    of_second, of_pair = map(_refused, without)

    assert "attn_bias=True" in of_second  # of contiguous (non-paged) K/V, which the second serves alone
    assert "attn_bias=True" not in of_pair
    assert all(requirements.paged for _, _, requirements in of_pair.values())
    assert len(of_pair) > 5
