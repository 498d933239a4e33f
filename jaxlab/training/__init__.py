"""Programs and the one loop that drives them."""
