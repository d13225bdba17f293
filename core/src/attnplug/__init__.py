"""Attention backends as parts."""
