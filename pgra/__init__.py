"""Prompt-guided retrieval augmentation: let a language model read the right sentences first."""

__version__ = "0.1.0"
