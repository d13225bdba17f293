"""The attention backend flashinfer: FlashInfer's paged prefill and decode kernels."""
