"""Re-timing: the order of events of one engine run, evaluated at other clocks in numpy (docs/detail.md)."""
