"""Which KV entries a decode step reads: one algorithm a file behind the KV index of SmartGen (section 2.3)."""
