"""Narrows: LLM serving for narrow networks and requests of very different lengths."""

__version__ = "0.1.0"
