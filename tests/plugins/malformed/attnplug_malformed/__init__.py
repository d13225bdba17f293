"""Its manifest is not TOML."""
