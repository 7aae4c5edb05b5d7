"""A real step beside its prediction, kernel by kernel."""
