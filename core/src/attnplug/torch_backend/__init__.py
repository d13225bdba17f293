"""The built-in backend: attention on torch's own kernels, on any device that torch has."""
