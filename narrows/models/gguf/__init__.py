"""GGUF files, turned into Hugging Face folders once."""
