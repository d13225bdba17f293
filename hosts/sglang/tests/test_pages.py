"""A backend that needs other pages than SGLang has: the refusal names the option of SGLang."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import attnplug
from attnplug.errors import NoBackendError, NotNegotiatedError
from attnplug.selection.process import PROCESS
from hosts.sglang.tests.rig import World

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = """
api = "1.0"
backend = { name = "acme_pages", summary = "A backend of a test: its module does not exist" }
[supports]
device_type = "cpu"
dtype = "float32"
head_size = { max = 256 }
block_size = { min = 64, multiple_of = 64 }
kv_layout = "NHD"
kv_cache_form = ["split", "joint"]
features = ["paged", "kv_in_cache"]
[variants.large]
summary = "acme_pages/large"
"""


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Offer the backend to this process, for one test."""
    monkeypatch.setattr(PROCESS, "state", None)
    path = tmp_path / "attnplug.toml"
    path.write_text(MANIFEST)
    attnplug.register("no_such_module_of_acme_pages", manifest=path)
    return "acme_pages/large"


@pytest.mark.parametrize("page", [1, 16])
def test_the_refusal_names_the_page_size(acme: str, page: int) -> None:
    with pytest.raises(NotNegotiatedError, match=f"pages have {page} tokens") as caught:
        World(page, (-1,), backend=acme).backend()
    assert "pages of 64, 128, 256 tokens are served" in str(caught.value)
    assert "start SGLang with --page-size 64" in str(caught.value)


def test_no_page_size_helps_where_the_model_is_not_served(acme: str) -> None:
    with pytest.raises(NoBackendError, match="sinks"):
        World(16, (-1,), backend=acme, sinks=True).backend()
