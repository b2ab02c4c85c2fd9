"""JUDGE: pure functions from events to findings; one file a family, one registry, no torch."""
