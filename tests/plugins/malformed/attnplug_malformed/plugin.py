"""Nobody gets this far."""
