"""Serves an int8 cache and nothing else."""
