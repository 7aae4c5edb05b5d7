"""What a run left behind: timeline, sums, summary, trace, and what its numbers rest on."""
