"""Optax transformations, one a file."""
