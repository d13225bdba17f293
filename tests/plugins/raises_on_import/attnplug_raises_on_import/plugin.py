"""A shared library that is missing shows up as this error, whatever the metadata says."""

msg = "libacme.so.4: cannot open shared object file: No such file or directory"
raise ImportError(msg)
