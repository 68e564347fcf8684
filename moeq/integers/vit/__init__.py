"""A Mixture-of-Experts vision transformer (V-MoE, M3ViT; paper 004), model type `moe_vit`.

transformers has no such model: moeq brings it, and registers it with transformers' Auto classes (see moeq/plugin.py).
"""
