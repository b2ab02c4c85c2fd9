"""The family "Schedules and parameters": its checks, one file a subject."""
