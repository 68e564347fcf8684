"""Products with packed experts on a GPU, in Triton: any mix of widths in one launch, no synchronisation with the host.

Only what computes imports Triton: arranging and undoing need torch alone.
"""
