"""Frozen causal LMs: loading, prompted states, generation, scoring; here or behind an endpoint."""
