"""Sweeps: many settings from one command, as the trials of one program where that is possible."""
