"""The attention backend triton: paged attention in Triton, for every NVIDIA GPU."""
