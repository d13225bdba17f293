"""What a library does that looks for a GPU while it is imported."""

msg = "no CUDA device is available"
raise RuntimeError(msg)
