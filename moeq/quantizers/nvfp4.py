"""nvfp4: numbers of 4 bits, 16 to a scale of 8 bits (NVFP4), and FP8 at 8 bits, see quantizers/floating.py."""

from __future__ import annotations

from moeq.quantizers.floating import declared

QUANTIZER = declared(
    "nvfp4", "4 bits as NVFP4 (a scale of 8 bits for 16 inputs), 8 bits as FP8 (a scale a row); GPTQ's feedback"
)
