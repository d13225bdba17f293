"""What a vendor is given: batches, phases, layers, limits, KV caches."""
