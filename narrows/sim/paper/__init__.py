"""What NanoCP and SmartGen publish, by simulation: each number beside ours (docs/reproduction.md)."""
