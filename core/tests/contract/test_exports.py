from __future__ import annotations

import pytest

from attnplug import contract


def test_every_exported_name_is_there():
    assert all(getattr(contract, name) is not None for name in contract.__all__)
    assert set(contract.__all__) <= set(dir(contract))
    assert sorted(contract._HOMES) == sorted(contract.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Backends'"):
        contract.Backends  # noqa: B018 - reading it is the test


def test_no_module_takes_the_place_of_a_name():
    """Importing a module sets its name in the package, and would hide a name that loads on first use."""
    assert not set(contract.__all__) & set(contract._HOMES.values())
