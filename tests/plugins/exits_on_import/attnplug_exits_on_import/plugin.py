"""Exits like a script when it is imported."""

import sys

sys.exit(3)
