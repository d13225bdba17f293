"""The ``attnplug`` command: a file per verb, each imported only when it is asked for."""
