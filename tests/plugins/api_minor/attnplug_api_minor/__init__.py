"""Is written for a newer minor version of the contract."""
