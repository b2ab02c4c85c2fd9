"""The family "Accumulation and denominators": its checks, one file a subject."""
