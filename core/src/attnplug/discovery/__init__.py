"""What is installed: a guarded walk over distributions, and the registry of the backends that they offer."""
