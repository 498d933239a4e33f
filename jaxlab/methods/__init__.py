"""The mathematics of the papers: one module of pure functions each."""
