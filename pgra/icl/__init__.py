"""In-context learning: exemplar choice (KATE) and feedback memory (MemPrompt)."""
