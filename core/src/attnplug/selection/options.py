"""A backend's own settings: collected from every level, validated by its manifest, never dropped."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Any

from attnplug.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.discovery.registry import Registry
    from attnplug.manifest.schema import Manifest
    from attnplug.request.settings import Settings


def check_options(registry: Registry, settings: Settings) -> None:
    """
    Check everything that is set for installed backends, whether or not they can serve.

    Options of a known backend that is not installed wait for it: only its manifest can say whether they are right.

    Raises:
        SettingsError: An option is unknown or its value is not allowed, or options are given for one variant.
        UnknownBackendError: A name is neither installed nor known.
    """
    for name in settings.options:
        check_owner(registry, name)
    for plugin in registry.plugins if settings.options else ():
        if plugin.manifest is not None:
            options_of(plugin.manifest, settings)


def check_owner(registry: Registry, name: str) -> None:
    """
    Check that options can belong to what a name selects.

    Raises:
        SettingsError: It is one variant.
        UnknownBackendError: It is neither installed nor known.
    """
    if "/" in name:
        raise SettingsError(
            f"options for {name!r} were given",
            "options belong to a backend, and hold for all of its variants",
            f"give them to {name.partition('/')[0]!r}",
        )
    registry.resolve(name)


def options_of(manifest: Manifest, settings: Settings) -> Mapping[str, Any]:
    """
    Return every option of a backend with its value: set under its name, under an alias, or the default. Whichever name
    was used, a call comes before `using`, that before the environment, that before the configuration file.

    Raises:
        SettingsError: An option is unknown or its value is not allowed.
    """
    if not settings.options:
        return manifest.default_options  # nearly always, and for every candidate that can serve
    places = {key: place for place, key in enumerate(settings.sources)}
    found = [
        (places.get(f"options.{name}.{option}", -1), option, value, f"options.{name}.{option}")
        for name in (*manifest.aliases, manifest.name)
        for option, value in settings.options.get(name, {}).items()
    ]
    found.sort(key=itemgetter(0))  # by precedence; of equals, the backend's own name has the last word
    given = {option: value for _, option, value, _ in found}
    return manifest.read_options(
        given, {option: settings.sources.get(key, "the settings") for _, option, _, key in found}
    )
