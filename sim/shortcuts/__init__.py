"""Ways around the events: sums of serial programs, equal ranks once, equal layers once, few contexts for many.

Each must give what the event run gives: to the picosecond in time and to 1e-9 in energy (tests/test_detail.py), but for
contexts, which state their error. Sweeps use them, the search for the settled clock, and runs that ask for them.
"""
