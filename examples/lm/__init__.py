"""A small language model to compare optimizers on: its text, its network, its training loop."""
