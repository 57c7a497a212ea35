"""Second stage: candidates to evidence under a prompt."""
