"""Claims sinks, windows and soft caps, and drops them."""
