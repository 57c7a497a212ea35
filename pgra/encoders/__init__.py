"""Text encoders: a sentence to a vector."""
