"""Metrics, structured logs and traces; what a credential looks like. Knows nothing of what is measured or logged."""
