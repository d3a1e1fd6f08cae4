"""Single-pass kernels: a rule that is local to blocks of rows, run tile by tile."""
