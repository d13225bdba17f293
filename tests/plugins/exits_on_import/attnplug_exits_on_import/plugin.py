"""What a script does that is no module."""

import sys

sys.exit(3)
