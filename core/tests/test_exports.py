from __future__ import annotations

import sys
from importlib import import_module

import pytest

PACKAGES = [
    "attnplug",
    *(f"attnplug.{name}" for name in ("contract", "dense", "evidence", "manifest", "models", "negotiation", "request")),
]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_there(package):
    module = import_module(package)

    assert all(getattr(module, name) is not None for name in module.__all__)
    assert dir(module) == sorted(module.__all__)


@pytest.mark.parametrize("package", PACKAGES)
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'Backends'"):
        import_module(package).Backends  # noqa: B018 - reading it is the test


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_takes_the_place_of_a_name(package):
    """Importing a module sets its name in the package, and would hide a name that loads on first use."""
    module = import_module(package)
    children = (home.removeprefix(f"{package}.") for home in sys.modules if home.startswith(f"{package}."))
    modules = {child for child in children if "." not in child}

    assert not set(module.__all__) & modules
