"""Attention over int8 queries, keys and values, and mixed caches, as an attention backend for attnplug."""
