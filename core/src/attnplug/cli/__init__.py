"""The ``attnplug`` command: a module for each built-in command, imported only when that command runs."""
