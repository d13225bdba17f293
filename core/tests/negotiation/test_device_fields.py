"""Vendors, and facts that a described device leaves open."""

from __future__ import annotations

import pytest

from attnplug.manifest.reader import parse_manifest
from attnplug.negotiation.candidate import make_candidate
from attnplug.negotiation.fix import find_fix
from attnplug.negotiation.matching import Request, negotiate
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements

WANTED = Requirements(head_size=64, num_q_heads=8, num_kv_heads=2, dtype="float16", paged=False)
AMD, INTEL = Device("cuda", vendor="amd"), Device("xpu", vendor="intel")


def candidate(supports):
    head = 'api = "1.0"\nbackend = { name = "acme", summary = "s" }\n[supports]\ndtype = "float16"\nhead_size = 64\n'
    manifest = parse_manifest(head + supports)
    return make_candidate(manifest, manifest.variants[0], lambda _: None)


def objections(supports, device):
    return [str(reason) for reason in negotiate(candidate(supports), Request(WANTED, device)).objections]


@pytest.mark.parametrize(
    ("supports", "device", "message"),
    [
        ('device_type = "cuda"\ncompute_capability = { min = "8.0" }', Device.cuda("9.0"), []),
        (
            'device_type = "cuda"\ncompute_capability = { min = "8.0" }',
            AMD,
            ["requires vendor nvidia; the device is from amd"],
        ),
        (
            'device_type = ["cpu", "cuda"]\ncompute_capability = "9.0"',
            AMD,
            ["requires vendor nvidia; the device is from amd"],
        ),
        ('device_type = "cuda"\nvendor = "amd"', AMD, []),
        (
            'device_type = "cuda"\nvendor = "amd"\ncompute_capability = "9.0"',
            Device.cuda("9.0"),
            ["requires vendor amd; the device is from nvidia"],
        ),
        ('device_type = "cuda"\nvendor = ["nvidia", "amd"]\ncompute_capability = "9.0"', AMD, []),
        ('device_type = "xpu"', INTEL, []),
        ('device_type = "xpu"\nvendor = "other"', INTEL, ["requires vendor other; the device is from intel"]),
        ('device_type = "cuda"', Device.cuda("9.0"), ["does not support compute_capability=9.0"]),
        (
            'device_type = "cuda"\ncompute_capability = "9.0"\ndevice_name = "NVIDIA H200"',
            Device.cuda("9.0", name="NVIDIA H100"),
            ["requires device name NVIDIA H200; the device is NVIDIA H100"],
        ),
        ('device_type = "cuda"\ncompute_capability = "9.0"\ndevice_name = "NVIDIA H200"', Device.cuda("9.0"), []),
        ('device_type = "cuda"\ncompute_capability = "9.0"', Device.cuda("9.0", name="anything"), []),
    ],
)
def test_devices(supports, device, message):
    assert objections(supports, device) == message


def test_the_fix_of_a_wrong_vendor_is_another_device():
    for_amd = candidate('device_type = "cuda"\nvendor = "amd"')

    fix = find_fix(for_amd, Request(WANTED, Device.cuda("9.0")))

    assert fix.device == AMD
    assert str(fix) == "run on cuda (amd)"
    assert not negotiate(for_amd, Request(*fix.apply(WANTED, Device.cuda("9.0")))).objections


def test_the_vendor_that_is_declared_first_is_offered_first():
    supports = 'device_type = "cuda"\nvendor = ["other", "nvidia"]\ncompute_capability = { min = "1.0" }'

    fix = find_fix(candidate(supports), Request(WANTED, Device.cpu()))

    assert str(fix) == "run on cuda (other)"


def test_an_existing_device_comes_before_one_never_built():
    supports = 'device_type = "cuda"\ncompute_capability = { min = "1.0", max = "8.0" }'

    fix = find_fix(candidate(supports), Request(WANTED, Device.cpu()))

    assert str(fix) == "run on cuda:8.0"


@pytest.mark.parametrize(
    ("range_", "found_fix"), [('max = "9.0"', "run on cuda:8.9"), ('min = "9.0"', "run on cuda:12.1")]
)
def test_a_rule_against_the_end_of_a_range_leaves_the_rest(range_, found_fix):
    supports = f'device_type = "cuda"\ncompute_capability = {{ {range_} }}\n'
    rule = '[[rules]]\nwhen = { compute_capability = "9.0" }\nbecause = "it hangs"\n'

    fix = find_fix(candidate(supports + rule), Request(WANTED, Device.cpu()))

    assert str(fix).endswith(found_fix)
