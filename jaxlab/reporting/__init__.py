"""What a run leaves behind: its directory, metric writers, claims, figures, report and board.

Nothing here imports JAX, and matplotlib, SciPy and rich are imported by the functions that need
them, so that a command that only reads results starts at once.
"""
