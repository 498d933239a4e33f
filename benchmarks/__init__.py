"""Measurements of speed, run by hand: they depend on the machine, so no test holds them."""
