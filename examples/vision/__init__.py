"""Small image classifiers to compare optimizers on: their images, their networks."""
