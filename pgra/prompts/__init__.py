"""Templates, verbalizers and few-shot prefixes."""
