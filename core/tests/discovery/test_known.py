"""What is known of absent plugins, and the default orders."""

from __future__ import annotations

from typing import Any

import pytest

from attnplug.discovery.plugin import parse_known, read_known
from attnplug.errors import ManifestError
from attnplug.negotiation.candidate import make_candidate
from attnplug.negotiation.evaluation import evaluate
from attnplug.negotiation.matching import Request
from attnplug.negotiation.ranking import Policy, rank
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements


def test_known_plugins_have_unique_names_and_can_be_installed() -> None:
    plugins = read_known().plugins
    names = [name for plugin in plugins for name in (plugin.name, *plugin.aliases)]

    expected = ["blocksparse", "flash_attn", "flashinfer", "flashmla", "int8_ixformer", "triton"]
    assert [plugin.name for plugin in plugins] == expected
    assert len(set(names)) == len(names)
    assert {"FLASHINFER", "FLASH_ATTN", "BLOCK_SPARSE_FLASH_ATTN"} <= set(names)
    assert all(plugin.install == f"attnplug-{plugin.name.replace('_', '-')}" and plugin.summary for plugin in plugins)


def test_default_orders_name_known_backends_and_their_evidence() -> None:
    known = read_known()
    names = {plugin.name for plugin in known.plugins}

    for order in known.orders:
        assert {name.partition("/")[0] for name in order.order} <= names
        assert " us " in order.because or order.because.startswith("not measured there: ")
        assert order.when


MEASURED = ["flash_attn/fa3_vllm", "flash_attn/fa3", "flashinfer/all", "flash_attn/all", "acme/all"]
VARIANTS = ["flash_attn/all", "flash_attn/fa3", "flash_attn/fa3_vllm"]
ORDERS = {
    "9.0": MEASURED,
    "8.6": [*VARIANTS, "flashinfer/all", "acme/all"],
    "10.0": ["flashinfer/all", *VARIANTS, "acme/all"],
    "12.0": ["flashinfer/all", *VARIANTS, "acme/all"],
    "7.5": ["acme/all", *VARIANTS, "flashinfer/all"],  # by name
}


@pytest.mark.parametrize("capability", ORDERS)
def test_the_default_order_holds_on_its_devices(capability: str, plugin: Any) -> None:
    rest = '[variants.{}]\nsupports = {{ device_type = "cuda", compute_capability = {{ min = "7.0" }} }}\n'
    fa3 = "".join(rest.format(name) for name in ("fa3", "fa3_vllm"))
    made = [plugin(name, rest=rest.format("all")) for name in ("acme", "flashinfer")]
    made.append(plugin("flash_attn", rest=rest.format("all") + fa3))
    candidates = [make_candidate(p.manifest, v, lambda _: None) for p in made for v in p.manifest.variants]
    requirements = Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="float32")
    request = Request(requirements, Device.cuda(capability))

    evaluations = [evaluate(candidate, request) for candidate in candidates]

    found = rank(evaluations, Policy(orders=read_known().orders))

    assert [evaluation.candidate.id for evaluation in found.evaluations] == ORDERS[capability]
    known = capability != "7.5"
    assert (found.decided_by, bool(found.because)) == ("default order" if known else "name", known)


def test_a_wrong_condition_is_an_error_that_names_the_file() -> None:
    text = '[[order]]\nwhen = { compute_capability = "fast" }\norder = ["a"]\nbecause = "1 us"\n'

    with pytest.raises(ManifestError, match=r"known\.toml"):
        parse_known(text)


def test_a_missing_key_is_an_error() -> None:
    with pytest.raises(KeyError, match="install"):
        parse_known('[plugins.a]\naliases = []\nsummary = "a"\n')
