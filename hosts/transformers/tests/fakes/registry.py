"""Replaces the installed backends by one fake."""

from __future__ import annotations

from attnplug.discovery.plugin import Plugin
from attnplug.discovery.registry import Registry
from attnplug.manifest.reader import parse_manifest
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import process


def replace_backends(manifest, module, name):
    """Let the process select from one plugin alone, on a CPU and without settings. The caller restores the state."""
    registry = Registry([Plugin(name, module, name, "1.0", parse_manifest(manifest, f"{name}/attnplug.toml"))])
    process.PROCESS.state = process.ProcessState(registry, Settings(), registry.generation, own_device=Device.cpu())
