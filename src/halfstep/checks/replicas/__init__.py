"""The family "Replicas": its checks, one file a subject."""
