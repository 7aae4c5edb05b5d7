"""Files, tables and messages on their way out."""
