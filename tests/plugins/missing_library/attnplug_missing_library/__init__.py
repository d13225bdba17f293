"""Its module opens a shared library that is not there."""
