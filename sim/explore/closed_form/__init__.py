"""A closed form of latency and energy over layouts: fitted on a few samples, judged on other scenarios."""
