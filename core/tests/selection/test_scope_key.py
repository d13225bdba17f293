"""`scope_key`: equal as long as no decision could change, and another one afterwards."""

from __future__ import annotations

import asyncio
import threading
from contextvars import copy_context
from functools import partial

import pytest

import attnplug
from attnplug.selection import process
from attnplug.selection.process import PROCESS
from tests.threads import together

MANIFEST = """\
api = "1.0"
backend = { name = "extra", summary = "made for a test" }
[supports]
device_type = "cuda"
dtype = "bfloat16"
head_size = { min = 1 }
[variants.only]
"""


def test_the_key_is_equal_while_nothing_changes(both, request_of) -> None:
    before = attnplug.scope_key()
    attnplug.select(request_of())
    attnplug.explain(request_of(), attnplug.Device.cpu())

    assert attnplug.scope_key() == before
    assert hash(attnplug.scope_key()) == hash(before)


@pytest.mark.parametrize(
    "keywords",
    [
        {"backend": "generic"},
        {"backend": ["generic", "auto"]},
        {"device": "cpu"},
        {"kv_layout": "HND"},
        {"options": {"flash": {"splits": 1}}},
        {"options": {"flash": {"splits": float("nan")}}},
    ],
)
def test_a_scope_has_a_key_of_its_keywords(both, keywords) -> None:
    outside = attnplug.scope_key()

    with attnplug.using(**keywords):
        inside = attnplug.scope_key()
    with attnplug.using(**keywords):
        again = attnplug.scope_key()

    assert inside != outside
    assert again == inside
    assert hash(again) == hash(inside)
    assert attnplug.scope_key() == outside


def test_options_of_another_type_are_another_key(both) -> None:
    keys = []
    for value in (1, True, 1.0, "1"):
        with attnplug.using(options={"flash": {"splits": value}}):
            keys.append(attnplug.scope_key())

    assert len(set(keys)) == len(keys)


def test_nested_scopes_have_the_key_of_what_they_amount_to(both) -> None:
    with attnplug.using(backend="generic"), attnplug.using(kv_layout="HND"):
        nested = attnplug.scope_key()
        with attnplug.using(kv_layout="NHD"):
            assert attnplug.scope_key() != nested
        assert attnplug.scope_key() == nested


def test_a_refresh_changes_the_key(installed) -> None:
    keys = [attnplug.scope_key()]
    for _ in range(3):
        attnplug.refresh()
        keys.append(attnplug.scope_key())

    assert len(set(keys)) == len(keys)


def test_a_registration_changes_the_key_once(installed, tmp_path) -> None:
    path = tmp_path / "extra.toml"
    path.write_text(MANIFEST)
    before = attnplug.scope_key()

    attnplug.register("extra_module", manifest=path)
    after = attnplug.scope_key()
    attnplug.register("extra_module", manifest=path)  # the same again

    assert after != before
    assert attnplug.scope_key() == after


def test_a_backend_that_fails_to_load_changes_the_key(world, flash_manifest, request_of) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    world("generic", broken=(flash_manifest.replace('"flash"', '"broken"').replace('"FLASH"', '"BROKEN"'), "1 / 0"))
    before = attnplug.scope_key()

    attnplug.load(request_of(paged=False), backend=["broken", "auto"])

    assert attnplug.scope_key() != before


def test_the_key_of_a_scope_changes_with_the_state(installed) -> None:
    with attnplug.using(backend="flash"):
        before = attnplug.scope_key()
        attnplug.refresh()

        assert attnplug.scope_key() != before


def test_threads_and_tasks_have_the_key_of_their_own_scope(both) -> None:
    outside, found = attnplug.scope_key(), {}

    async def task(name: str) -> None:
        with attnplug.using(backend=name):
            await asyncio.sleep(0)
            found[name] = attnplug.scope_key()

    async def tasks() -> None:
        await asyncio.gather(task("flash"), task("generic"))

    with attnplug.using(backend="generic"):
        generic = attnplug.scope_key()
        together(
            lambda: found.update(thread=attnplug.scope_key()),
            partial(copy_context().run, lambda: found.update(copied=attnplug.scope_key())),
        )
    asyncio.run(tasks())

    assert found["thread"] == outside
    assert found["copied"] == found["generic"] == generic
    assert found["flash"] not in {outside, generic}


def test_a_copied_context_takes_the_scope_to_other_threads(both, request_of) -> None:
    """Threads that begin and end after the block decide as in it, each in a copy, and leave it as it was."""
    with attnplug.using(backend="generic", source="a host"):
        context, key = copy_context(), attnplug.scope_key()
    outside, found, at_once = attnplug.scope_key(), [], threading.Barrier(4)

    def decide() -> None:
        at_once.wait(60)
        with attnplug.using(kv_layout="NHD"):
            inner = attnplug.select(request_of())
        found.append((attnplug.select(request_of()), inner, attnplug.scope_key()))

    together(*[lambda: context.copy().run(decide)] * 4)

    assert len(found) == 4
    for chosen, inner, seen in found:
        assert (chosen.backend, chosen.provenance["backend"]) == ("generic", "a host")
        assert (inner.backend, inner.agreement.kv_layout) == ("generic", "NHD")
        assert seen == key
    assert attnplug.scope_key() == outside
    assert context.run(attnplug.scope_key) == key


def test_one_context_is_entered_by_one_thread_at_a_time() -> None:
    """Which is why each thread runs in a copy of it."""
    context = copy_context()
    with pytest.raises(RuntimeError, match="already entered"):
        context.run(lambda: together(lambda: context.run(attnplug.scope_key)))


def test_a_first_call_scans(installed) -> None:
    attnplug.refresh()

    key = attnplug.scope_key()

    state = PROCESS.state
    assert isinstance(state, process.ProcessState)
    assert key == state.generation
