"""Its hook takes an unknown argument."""
