"""Registrations, refreshes and selections from many threads: as if one came after the other, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
from attrs import frozen

import attnplug
from attnplug.discovery import registry as registry_module
from attnplug.discovery.registry import Registry
from attnplug.manifest import memo
from attnplug.selection import options, process
from tests.threads import together

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MANIFEST = """\
api = "1.0"
backend = {{ name = "{name}", aliases = [], summary = "made for a test" }}
[supports]
device_type = "cuda"
compute_capability = {{ min = "8.0" }}
dtype = "bfloat16"
head_size = {{ min = 1 }}
[variants.only]
"""
PATIENCE = 0.2
"""Seconds that a thread waits for another one that may be waiting for it."""


@pytest.fixture
def manifest_of(tmp_path: Path) -> Callable[[str], Path]:
    """Return a maker of manifests, by the backend's name."""

    def write(name: str) -> Path:
        path = tmp_path / f"{name}.toml"
        path.write_text(MANIFEST.format(name=name))
        return path

    return write


def by_hand() -> set[str]:
    return {plugin.name for plugin in attnplug.registry().by_hand}


def test_a_refresh_during_a_registration_loses_nothing(installed, manifest_of, monkeypatch) -> None:
    entered, refreshed = threading.Event(), threading.Event()
    register = Registry.register

    def slow(self: Registry, plugin: attnplug.Plugin) -> None:
        entered.set()
        refreshed.wait(PATIENCE)  # the refresh happens here, unless it has to wait for the registration
        register(self, plugin)

    def refresh() -> None:
        entered.wait()
        attnplug.refresh()
        refreshed.set()

    monkeypatch.setattr(Registry, "register", slow)
    together(lambda: attnplug.register("notebook", manifest=manifest_of("mine")), refresh)

    assert by_hand() == {"mine"}
    attnplug.refresh()
    assert by_hand() == {"mine"}


def test_a_registration_during_a_scan_loses_nothing(installed, manifest_of, monkeypatch) -> None:
    attnplug.register("notebook", manifest=manifest_of("first"))
    entered, registered = threading.Event(), threading.Event()
    scan = Registry.scan

    def slow(settings: Any, plugins: Any = ()) -> Registry:
        entered.set()
        registered.wait(PATIENCE)
        return scan(settings, plugins)

    def register() -> None:
        entered.wait()
        attnplug.register("notebook2", manifest=manifest_of("second"))
        registered.set()

    attnplug.refresh()
    monkeypatch.setattr(Registry, "scan", slow)
    together(attnplug.registry, register)

    assert by_hand() == {"first", "second"}


def test_a_refresh_during_a_scan_leaves_nothing_old(installed, request_of, monkeypatch) -> None:
    """Settings that a thread has read before the refresh do not come into force after it."""
    entered, refreshed = threading.Event(), threading.Event()
    scan = Registry.scan

    def slow(settings: Any, plugins: Any = ()) -> Registry:
        entered.set()
        refreshed.wait(PATIENCE)
        return scan(settings, plugins)

    def refresh() -> None:
        entered.wait()
        monkeypatch.setenv("ATTNPLUG_BLOCK", "flash/new")
        attnplug.refresh()
        refreshed.set()

    monkeypatch.setenv("ATTNPLUG_BLOCK", "flash/old")
    attnplug.refresh()
    monkeypatch.setattr(Registry, "scan", slow)
    together(lambda: attnplug.select(request_of(), "cuda:9.0"), refresh)

    statuses = {verdict.id: verdict.status for verdict in attnplug.explain(request_of(), "cuda:9.0").verdicts}
    assert (statuses["flash/old"], statuses["flash/new"]) == ("eligible", "refused")


def test_a_failed_scan_loses_nothing(installed, manifest_of, monkeypatch) -> None:
    attnplug.register("notebook", manifest=manifest_of("mine"))
    attnplug.refresh()
    monkeypatch.setenv("ATTNPLUG_STRICT", "perhaps")
    for _ in range(2):
        with pytest.raises(attnplug.AttnplugError, match="ATTNPLUG_STRICT"):
            attnplug.registry()
    monkeypatch.delenv("ATTNPLUG_STRICT")

    assert by_hand() == {"mine"}


def test_a_decision_of_an_old_registry_is_not_repeated(installed, manifest_of, request_of, monkeypatch) -> None:
    """A selection that began before a registration may miss it; what begins after it may not, whichever ends first."""
    entered, registered = threading.Event(), threading.Event()
    first_list = Registry.candidates
    seen: list[bool] = []

    def slow(self: Registry, *arguments: Any, **keywords: Any) -> Any:
        found = first_list(self, *arguments, **keywords)
        if not entered.is_set():
            entered.set()
            registered.wait()
        return found

    def register() -> None:
        entered.wait()
        attnplug.register("notebook", manifest=manifest_of("mine"))
        registered.set()

    def explain() -> None:
        seen.append("mine/only" in {verdict.id for verdict in attnplug.explain(request_of(), "cuda:9.0").verdicts})

    monkeypatch.setattr(Registry, "candidates", slow)
    together(explain, register)
    explain()

    assert seen[1]


def test_a_profile_that_is_being_read_is_not_kept(installed, request_of, tmp_path, monkeypatch) -> None:
    """A thread that reads the old file while another one refreshes does not leave its content to later selections."""
    profile = tmp_path / "profile.toml"
    profile.write_text("[[measured]]\nmicroseconds = {'flash/old' = 1}\n")
    monkeypatch.setenv("ATTNPLUG_PROFILE", str(profile))
    attnplug.refresh()
    entered, refreshed = threading.Event(), threading.Event()
    parse = options.parse_toml

    def slow(text: str) -> Any:
        if not entered.is_set():
            entered.set()
            refreshed.wait()
        return parse(text)

    def refresh() -> None:
        entered.wait()
        profile.write_text("[[measured]]\nmicroseconds = {'flash/new' = 1}\n")
        attnplug.refresh()
        refreshed.set()

    monkeypatch.setattr(options, "parse_toml", slow)
    together(lambda: attnplug.select(request_of(), "cuda:9.0"), refresh)

    assert attnplug.select(request_of(), "cuda:9.0").id == "flash/new"


def test_threads_that_decide_at_once_return_one_decision(installed, request_of, monkeypatch) -> None:
    together_now, decided = threading.Barrier(4), []
    rank = process.ProcessState.remember

    def slow(self: process.ProcessState, *arguments: Any) -> Any:
        together_now.wait()
        return rank(self, *arguments)

    monkeypatch.setattr(process.ProcessState, "remember", slow)
    together(*[lambda: decided.append(attnplug.select(request_of(), "cuda:9.0"))] * 4)

    assert len({id(selection) for selection in decided}) == 1


@frozen
class Event:
    """One operation of a history, with the ticks of a common clock between which it happened."""

    kind: str
    name: str
    begin: int
    end: int
    seen: frozenset[str] = frozenset()


def check_history(history: list[Event]) -> None:
    """
    Every selection sees what was registered before it began, and nothing that nobody had begun to register. What one
    selection has seen, all that begin after its end see too: registrations have an order that all threads share.
    """
    registered = {event.name: event for event in history if event.kind == "register"}
    selections = [event for event in history if event.kind == "select"]
    ended = sorted(selections, key=lambda event: event.end, reverse=True)
    earlier: set[str] = set()
    for event in sorted(selections, key=lambda event: event.begin):
        while ended[-1].end < event.begin:
            earlier |= ended.pop().seen
        assert earlier <= event.seen
        assert {name for name, each in registered.items() if each.end < event.begin} <= event.seen
        assert event.seen <= {name for name, each in registered.items() if each.begin < event.end}


def test_a_history_of_everything_at_once(installed, manifest_of, request_of) -> None:
    clock, history, done = count(), [], threading.Event()
    manifests = {f"mine{index}": manifest_of(f"mine{index}") for index in range(40)}

    def record(kind: str, name: str, action: Callable[[], Any]) -> None:
        begin = next(clock)
        seen = action()
        history.append(Event(kind, name, begin, next(clock), seen if isinstance(seen, frozenset) else frozenset()))

    def register(names: list[str]) -> None:
        for name in names:
            record("register", name, lambda name=name: attnplug.register(f"of_{name}", manifest=manifests[name]))

    def register_all() -> None:
        together(*(lambda names=names: register(names) for names in (list(manifests)[::2], list(manifests)[1::2])))
        done.set()

    def refresh() -> None:
        record("refresh", "", attnplug.refresh)  # at least one, however busy the machine is
        while not done.wait(0.001):  # locks are unfair: without a pause it could keep the registrations waiting
            record("refresh", "", attnplug.refresh)

    def visible() -> frozenset[str]:
        explanation = attnplug.explain(request_of(sliding_window=random.choice([None, 8, 16])), "cuda:9.0")
        return frozenset(manifests) & {verdict.id.partition("/")[0] for verdict in explanation.verdicts}

    def select() -> None:
        while not done.is_set():
            record("select", "", visible)
        record("select", "", visible)

    together(register_all, refresh, refresh, select, select, select)

    assert by_hand() == set(manifests)
    assert {event.kind for event in history} == {"register", "refresh", "select"}
    check_history(history)


def test_registrations_of_one_name_leave_one(installed, manifest_of) -> None:
    path, outcomes = manifest_of("mine"), []

    def register(module: str) -> None:
        try:
            attnplug.register(module, manifest=path)
            outcomes.append(module)
        except attnplug.AttnplugError:
            pass

    together(*(lambda i=i: register(f"module{i}") for i in range(8)), *[attnplug.refresh] * 4)

    assert len(outcomes) == 1
    assert [plugin.module for plugin in attnplug.registry().by_hand] == outcomes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_not_locked_out(installed, request_of) -> None:
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with memo._lock, process._lock:
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:  # the copied locks are held by a thread that this process does not have
        signal.alarm(20)  # ends it where it hangs
        try:
            attnplug.explain(request_of(sliding_window=77), "cuda:9.0")
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    release.set()
    thread.join()

    assert os.waitstatus_to_exitcode(status) == 0


# Signal handlers and interrupts, at every line of registering and refreshing

FILES = tuple(module.__file__ for module in (process, registry_module))


def at_line(number: int, act: Callable[[], object], inject: Callable[[], object]) -> bool:
    """Run something, and in the middle of it, before the so-manyth line of these files, something else, once."""
    left = number

    def trace(frame: Any, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in FILES:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                inject()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
        # A trace stops between the last line of a `with` and the release of its lock, where no signal is delivered.
        process.PROCESS._unlock()
        registry_module._unlock_in_child()
    return left <= 0


def of_mine(manifest_of: Any) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return an action that registers between refreshes and selections, and a handler that registers and selects."""
    first, second = manifest_of("first"), manifest_of("second")

    def act() -> None:
        attnplug.refresh()
        attnplug.registry()
        attnplug.register("notebook", manifest=first)
        attnplug.refresh()
        attnplug.registry()

    def handle() -> None:
        attnplug.register("notebook2", manifest=second)

    return act, handle


def test_a_handler_that_registers_loses_nothing(installed, manifest_of) -> None:
    act, handle = of_mine(manifest_of)
    for number in count(1):
        process.PROCESS.state = process.unread()
        reached = at_line(number, act, handle)
        assert by_hand() == ({"first", "second"} if reached else {"first"}), number
        attnplug.refresh()
        assert by_hand() == ({"first", "second"} if reached else {"first"}), number
        if not reached:
            break
    assert number > 100


def test_a_handler_that_refreshes_and_selects_loses_nothing(installed, request_of, manifest_of) -> None:
    act, _ = of_mine(manifest_of)

    def handle() -> None:
        attnplug.refresh()
        attnplug.select(request_of(), "cuda:9.0")

    for number in count(1):
        process.PROCESS.state = process.unread()
        reached = at_line(number, act, handle)
        assert by_hand() == {"first"}, number
        if not reached:
            break


def test_an_interrupt_leaves_the_old_or_the_new_state(installed, manifest_of, request_of) -> None:
    act, handle = of_mine(manifest_of)

    def interrupt() -> None:
        raise KeyboardInterrupt

    for number in count(1):
        process.PROCESS.state = process.unread()
        handle()
        with suppress(KeyboardInterrupt):
            if not at_line(number, act, interrupt):
                break
        found = by_hand()
        assert found in ({"second"}, {"first", "second"}), number
        names = {each.backend for each in attnplug.registry().candidates()}
        assert names >= found, number
        attnplug.refresh()
        assert by_hand() == found, number
        act()
        assert by_hand() == {"first", "second"}, number
