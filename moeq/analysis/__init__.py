"""What a recorded routing trace says of a model: who is chosen where, and whether the prefill foretells the decode."""
