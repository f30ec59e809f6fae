"""What is measured before serving: which KV matters (importance) and how long prefill takes (timing)."""
