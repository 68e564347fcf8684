"""The wing of whole numbers: folded norms, static int8, vision transformers and their integer forward."""
