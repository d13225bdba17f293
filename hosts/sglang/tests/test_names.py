"""What a value of SGLang's option stands for."""

from __future__ import annotations

import pytest

from attnplug.errors import UnknownBackendError
from attnplug_sglang import names


def test_attnplug_alone_leaves_the_choice_open():
    assert names.backend_of("attnplug") is None


@pytest.mark.parametrize("candidate", ["flashinfer/fa3", "torch/sdpa", "acme"])
def test_a_name_of_a_candidate_stands_for_it(candidate):
    name = names.name_of(candidate)
    assert name == f"attnplug:{candidate}"
    assert names.is_own(name)
    assert names.backend_of(name) == candidate


@pytest.mark.parametrize("name", [None, "", "triton", "attnplugged", "ATTNPLUG", "flashinfer"])
def test_a_name_of_sglang_is_not_ours(name):
    assert not names.is_own(name)


@pytest.mark.parametrize("name", ["attnplug:", "triton", "attnplugged:torch/sdpa"])
def test_what_names_nothing_is_refused(name):
    with pytest.raises(UnknownBackendError, match=repr(name)) as error:
        names.backend_of(name)
    assert "--attention-backend attnplug" in error.value.fix
