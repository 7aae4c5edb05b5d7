"""``simulate``: the work laid out, its steady state found, every kernel run."""
