"""mxfp4: numbers of 4 bits, 32 to a power of two (MXFP4), and FP8 at 8 bits, see quantizers/floating.py."""

from __future__ import annotations

from moeq.quantizers.floating import declared

QUANTIZER = declared(
    "mxfp4", "4 bits as MXFP4 (a power of two for 32 inputs), 8 bits as FP8 (a scale a row); GPTQ's feedback"
)
