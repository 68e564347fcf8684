"""Experts whose precision follows the workload while a model runs (paper 001, DynaExq), under a budget of bytes."""
