"""Perplexity and lm-eval."""
