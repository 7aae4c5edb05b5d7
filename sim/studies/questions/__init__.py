"""The published questions, one reproducible study each: a page under docs/studies by one command each."""
