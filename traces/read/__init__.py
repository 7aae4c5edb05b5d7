"""Readers of real profiler traces."""
