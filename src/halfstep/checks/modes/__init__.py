"""The family "Modes": its checks, one file a subject."""
