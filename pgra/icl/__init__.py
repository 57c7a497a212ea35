"""In-context learning: which exemplars stand before a text, and LMs that go on with it (KATE)."""
