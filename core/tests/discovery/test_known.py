"""What is known of absent plugins, and the default orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from attnplug.discovery.plugin import parse_known, read_known
from attnplug.errors import ManifestError
from attnplug.manifest.reader import read_manifest
from attnplug.negotiation.candidate import make_candidate
from attnplug.negotiation.evaluation import evaluate
from attnplug.negotiation.matching import Request, all_hold
from attnplug.negotiation.ranking import Policy, rank
from attnplug.request.capability import HARDWARE
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements

ROOT: Final = Path(__file__).parents[3]
ON_DEVICE: Final = ("device_type", "vendor", "compute_capability", "latent", "head_size", "head_size_v")


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
        assert " us " in order.because or order.because.startswith("not measured on {device}: ")
        assert order.when


CUDA = [Device.cuda(capability) for capability in HARDWARE] + [
    Device("cuda", vendor="amd", arch=arch) for arch in ("gfx942", "gfx1100")
]


@pytest.mark.parametrize("device", CUDA, ids=str)
@pytest.mark.parametrize("latent", [False, True])
def test_no_alphabet_decides_between_plugins(device: Device, latent: bool) -> None:
    """Plugins that may compete on a device have different places in its order, which names its source."""
    known = read_known()
    sizes = {"head_size": 576, "head_size_v": 512, "latent": True} if latent else {"head_size": 128}
    requirements = Requirements(num_q_heads=8, num_kv_heads=1, dtype="bfloat16", **sizes)
    request = Request(requirements, device)
    (order, *_) = [item for item in known.orders if all_hold(item.when, request.facts, request.requested_names)]

    names = {name.partition("/")[0] for name in order.order}
    manifests = (read_manifest(path) for path in sorted((ROOT / "plugins").glob("*/src/*/attnplug.toml")))
    variants = [(manifest, variant) for manifest in manifests for variant in manifest.variants]
    refused = {
        (manifest.name, variant.name)
        for manifest, variant in variants
        for reason in make_candidate(manifest, variant, lambda _: None).objections(request.requested)
        if reason.field in ON_DEVICE
    }
    may_compete = {m.name for m, v in variants if (m.name, v.name) not in refused}
    assert may_compete <= names
    where = str(device.compute_capability or device)
    assert " us " in order.because or order.source(request).startswith(f"not measured on {where}: ")


MEASURED = ["flash_attn/fa3_vllm", "flash_attn/fa3", "flashinfer/all", "flash_attn/all", "acme/all"]
VARIANTS = ["flash_attn/all", "flash_attn/fa3", "flash_attn/fa3_vllm"]
ORDERS = {
    "9.0": MEASURED,
    "8.6": [*VARIANTS, "flashinfer/all", "acme/all"],
    "10.0": ["flashinfer/all", *VARIANTS, "acme/all"],
    "12.0": ["flashinfer/all", *VARIANTS, "acme/all"],
    "7.5": [*VARIANTS, "flashinfer/all", "acme/all"],
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
    assert (found.decided_by, bool(found.because)) == ("default order", True)


def test_a_wrong_condition_is_an_error_that_names_the_file() -> None:
    text = '[[order]]\nwhen = { compute_capability = "fast" }\norder = ["a"]\nbecause = "1 us"\n'

    with pytest.raises(ManifestError, match=r"known\.toml"):
        parse_known(text)


def test_a_missing_key_is_an_error() -> None:
    with pytest.raises(KeyError, match="install"):
        parse_known('[plugins.a]\naliases = []\nsummary = "a"\n')
