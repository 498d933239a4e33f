"""Training re-evaluation curves, measured and predicted."""
