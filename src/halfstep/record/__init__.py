"""KEEP: the run directory: append-only, compressed, readable after a kill."""
