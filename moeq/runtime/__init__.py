"""Running packed checkpoints in transformers."""
