"""``python -m attnplug_comfyui PATH``: write the custom node folder into a checkout of ComfyUI."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from attnplug.commands import OK, WRONG, complain, say
from attnplug.errors import AttnplugError
from attnplug_comfyui.folder import install

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m attnplug_comfyui", description="Write the nodes of attnplug into a checkout of ComfyUI."
    )
    parser.add_argument("comfyui", help="the folder that has custom_nodes")
    parser.add_argument("--link", action="store_true", help="make a link to this distribution instead of a copy")
    given = parser.parse_args(arguments)
    try:
        target = install(given.comfyui, link=given.link)
    except AttnplugError as error:
        complain(str(error))
        return WRONG
    say(f"wrote {target}: start ComfyUI anew, and add the node 'Attention by attnplug'")
    return OK


if __name__ == "__main__":
    sys.exit(main())
