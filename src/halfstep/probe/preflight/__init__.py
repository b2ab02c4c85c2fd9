"""`manager.preflight`: one update each way before a long run."""
