"""The attention backend flashmla: FlashMLA's dense kernels for latent attention."""
