"""A memory of what users corrected, and its use in an LM's prompt (Madaan et al. 2022)."""
