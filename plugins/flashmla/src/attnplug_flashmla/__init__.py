"""The attention backend flashmla: FlashMLA's kernels for latent attention."""
