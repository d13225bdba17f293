"""Offers a backend of a name that another distribution has."""
