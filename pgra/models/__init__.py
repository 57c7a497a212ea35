"""Encoders, causal LMs and fused readers behind small interfaces."""
