"""The evidence of `benchmarks/quality.py`: its tasks, the optimizers on trial, finished runs, the report."""
