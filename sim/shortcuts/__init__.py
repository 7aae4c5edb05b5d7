"""Shortcuts past the events: sums of serial programs, equal ranks once, equal layers once, buckets of contexts.

Each must equal the event run to the picosecond in time and to 1e-9 in energy (tests/test_detail.py), except buckets of
contexts, which state their error, and orders of events at other clocks, which say where they hold. Used by sweeps, by
the search for the steady clock, and by runs that ask for them.
"""
