"""Its manifest is valid, and its module needs a library that is not there."""
