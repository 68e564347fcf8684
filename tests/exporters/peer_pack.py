"""Run by a peer's interpreter: packs arrays of codes with the peer's own code. Knows no moeq.

Arguments: the packer, a safetensors file of int32 codes {"bits.number": [..., K]}, and where to write the words.
"""

import sys

import torch
from safetensors.torch import load_file, save_file


def auto_round_words(codes, bits):
    from auto_round.utils.bit_packing import pack_bitstream

    return pack_bitstream(codes, bits, dim=-1)


def auto_round_linear_words(codes, bits):
    """qweight as auto-round's own linear packs it: codes come back from values with scale 1 and zero point 0."""
    from auto_round_extension.torch.qlinear_torch import QuantLinear

    rows, inputs = codes.shape
    linear = torch.nn.Linear(inputs, rows, bias=False)
    linear.weight.data = codes.float()
    packed = QuantLinear(bits, inputs, inputs, rows, bias=False)
    packed.device = "cpu"
    packed.pack(linear, torch.ones(rows, 1), torch.zeros(rows, 1), device="cpu")
    return packed.qweight.t().contiguous()


def compressed_words(codes, bits):
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    signed = (codes - 2 ** (bits - 1)).to(torch.int8)
    if signed.dim() == 2:
        return pack_to_int32(signed, bits)
    return torch.stack([pack_to_int32(one, bits) for one in signed])


PACKERS = {
    "auto-round": auto_round_words,
    "auto-round-linear": auto_round_linear_words,
    "compressed-tensors": compressed_words,
}
packer, source, target = sys.argv[1:]
words = {
    name: PACKERS[packer](codes, int(name.split(".")[0])).contiguous() for name, codes in load_file(source).items()
}
save_file(words, target)
