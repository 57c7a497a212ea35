"""Frozen causal LMs, local or at an endpoint: loading, prompted states, generation, scoring."""
