"""verify: whether a checkpoint's files are whole, and whether its runtime computes what its weights say."""
