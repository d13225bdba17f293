"""What is installed: a guarded scan of distributions, and the registry of the backends that they offer."""
