"""SHOW: a run and its findings in the terminal, as JSON and as HTML; from plain data, no torch."""
