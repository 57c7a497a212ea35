"""First stage: texts to candidates."""
