"""A fake of the vendor library: it checks and records every call, and computes in float64."""
