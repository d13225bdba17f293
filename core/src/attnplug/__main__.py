"""``python -m attnplug``: the command, for environments whose scripts are not on the path."""

from __future__ import annotations

import sys

from attnplug.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
