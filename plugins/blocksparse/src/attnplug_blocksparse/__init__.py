"""Block-sparse attention for attnplug: local blocks and vertical strides, in Triton."""
