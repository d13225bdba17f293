"""The attention backend flashinfer, for attnplug: FlashInfer's paged prefill and decode kernels."""
