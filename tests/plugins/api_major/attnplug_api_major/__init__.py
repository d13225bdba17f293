"""Is written for another major version of the contract."""
