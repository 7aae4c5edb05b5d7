"""``wattline ui``: a local page on which scenarios are changed and answer at once."""
