"""What backends are tested with: the conformance kit, its oracle, and the commands `check`, `new` and `bench`."""
