"""``simulate``: the kernel graph built, its steady state found, every kernel run."""
