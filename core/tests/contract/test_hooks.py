from __future__ import annotations

import subprocess
import sys

import pluggy

from attnplug.contract import hooks
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import agree


class Plugin:
    @hooks.hookimpl
    def attnplug_backend(self, variant, agreement):
        return ToyBackend if (variant, agreement.id) == ("plain", "toy/plain") else None


def test_a_plugin_answers_through_the_hooks():
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    manager.register(Plugin())
    manager.check_pending()
    selection = agree()

    found = manager.hook.attnplug_backend(variant="plain", agreement=selection.agreement)

    assert found is ToyBackend
    probed = manager.hook.attnplug_probe(variant="plain", agreement=selection.agreement, device=selection.device)
    assert probed is None


def imported(statement):
    """Return which of torch and pluggy a fresh interpreter has imported after a statement."""
    code = f"{statement}\nimport sys\nprint(*(name for name in ('torch', 'pluggy') if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_a_plugin_module_needs_no_torch():
    assert imported("from attnplug.contract import hookimpl") == ["pluggy"]
    assert imported("import attnplug.contract") == []


def test_the_contract_needs_no_pluggy():
    assert imported("from attnplug.contract import Backend, check_backend_class") == ["torch"]
