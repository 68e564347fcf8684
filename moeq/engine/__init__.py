"""Experts as tasks: handed to processes or to a Ray cluster, and gathered in order."""
