"""With runtime, the only room that knows transformers: sources, loading, experts, text, walking."""
