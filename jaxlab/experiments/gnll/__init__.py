"""G-NLL: how uncertain a language model is, from its greedy answer alone."""
