"""The built-in backend: attention on torch's own kernels, on all devices of torch."""
