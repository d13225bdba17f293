"""Is never imported."""
