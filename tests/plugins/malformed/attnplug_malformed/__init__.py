"""Its manifest is no TOML."""
