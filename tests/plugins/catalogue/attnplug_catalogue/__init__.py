"""A manifest as large as a real one, for kernel libraries that exist nowhere."""
