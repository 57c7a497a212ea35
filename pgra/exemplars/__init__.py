"""Which labelled examples stand in a prompt."""
