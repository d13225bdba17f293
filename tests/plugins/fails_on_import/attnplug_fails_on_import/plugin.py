"""Fails like a library that searches for a GPU while it is imported."""

msg = "no CUDA device is available"
raise RuntimeError(msg)
