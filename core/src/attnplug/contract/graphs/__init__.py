"""CUDA graphs: shapes, their buffers, and what a capture freezes."""
