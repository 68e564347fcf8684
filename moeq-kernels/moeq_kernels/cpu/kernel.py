"""The CPU's kernel: packed matrices of any width times rows of activations, every packed byte read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from moeq_kernels.cpu.arrangement import Shape
from moeq_kernels.cpu.codes import CODES
from moeq_kernels.cpu.forms import AVX2_LANES, FORMS, Form, forms
from moeq_kernels.cpu.layer import PackedLayer, PackedLinear
from moeq_kernels.cpu.matrices import form_of
from moeq_kernels.cpu.versions import Block, Places, VersionedLayer
from moeq_kernels.cpu.walks import Walk, name_of
from moeq_kernels.description import DOWN, LayerOfExperts, Matrix

CONTENDED = range(1, 17)  # rows of an expert for which forms are told apart
WALKED_WITH_AVX2 = 16  # rows from which on AVX2 unpacks trellis codes, where it has not been measured
TILED_PREFILL = 4  # times as many rows of an expert as of a matrix alone are multiplied by tiles
MOST_SUM = 2**31 - 1  # a group's sum of codes times bytes of activations is an int32


def contenders(bits: int, state_bits: int) -> tuple[str, ...]:
    """Forms to choose from, those expected to be fastest first: plain loops only where there are no others, and of
    several that multiply codes by the same compiled code the first. bits: of codes; state_bits: of a trellis, or 0."""
    codes = name_of(bits, state_bits) if state_bits else str(bits)
    found: dict[tuple[Form, ...], str] = {}
    for name in [name for name in forms() if FORMS[name].lanes > 1] or forms():
        found.setdefault(tuple(form_of(FORMS[name], codes, rows) for rows in CONTENDED), name)
    return tuple(found.values())


class CpuKernel:
    """One form of it, by default the one expected to be fastest here; see `description.Kernel`.

    prefill: rows of an expert from which it is unpacked and multiplied by torch. Errors, relative to the largest
    output, against float64 with the same codes: below 1e-5 but for the rounding of what lies between gate and down
    (bf16 activations: bf16) and of the result to the activations' dtype. Forms that multiply bf16 activations as whole
    numbers of three bytes move those below 1/16384 of the largest of their row and group by 2**-22 of that at most.

    Forms of int8 round activations besides: each by at most 1/254 of the largest of its row and group, so that an
    output is wrong by at most the sum over groups of that times the sum of the weights' sizes. For activations of a
    normal distribution and groups of 128 that is 0.6 to 0.7 % of the outputs, root of the mean square; a group with an
    outlier loses more. Only a name chooses them. Dense matrices are multiplied with activations as they are.
    """

    name = "cpu"

    def __init__(self, form: str | None = None, prefill: int | None = None) -> None:
        self.form = FORMS[form or forms()[0]]
        if not self.form.runs_here():
            raise ValueError(f"this CPU has no {', '.join(self.form.features)}, which form {self.form.name} needs")
        self.prefill = prefill

    def refusal(self, layer: LayerOfExperts) -> str | None:
        matrices = layer.matrices
        if not matrices or any(set(one) != set(matrices[0]) or DOWN not in one for one in matrices):
            return f"experts do not have the same matrices, {DOWN} among them"
        try:
            shapes = [{name: Shape.of(matrix) for name, matrix in one.items()} for one in matrices]
        except ValueError as error:
            return str(error)
        why = next((why for one in shapes for shape in one.values() if (why := self._overflow(shape))), None)
        if why is not None:
            return why
        sizes = {tuple((name, one[name].rows, one[name].inputs) for name in sorted(one)) for one in shapes}
        return None if len(sizes) == 1 else f"experts of different sizes: {sorted(sizes)[:2]}"

    def layer(self, layer: LayerOfExperts) -> PackedLayer:
        why = self.refusal(layer)
        if why is not None:
            raise ValueError(why)
        shapes = [Shape.of(matrix) for one in layer.matrices for matrix in one.values()]
        return PackedLayer(layer, self._holding(shapes), self._experts_prefill(shapes))

    def linear(self, matrix: Matrix, bias: Tensor | None = None) -> PackedLinear:
        shape = Shape.of(matrix)
        why = self._overflow(shape)
        if why is not None:
            raise ValueError(why)
        return PackedLinear(matrix, bias, self._holding([shape]), self._prefill([shape]))

    def versions(
        self, layer: LayerOfExperts, versions: Sequence[Mapping[str, Matrix]], held: Tensor, places: Places
    ) -> VersionedLayer:
        """A layer whose experts have one of several versions each, in blocks of a buffer; see `versions`.

        versions: an expert of each, of which all others have the shapes; layer: biases and what is computed between
        matrices. ValueError for what cannot be arranged.
        """
        blocks = [Block(matrices) for matrices in versions]
        shapes = [shape for block in blocks for shape in block.shapes.values()]
        why = next((why for shape in shapes if (why := self._overflow(shape))), None)
        if why is not None:
            raise ValueError(why)
        return VersionedLayer(layer, self._holding(shapes), self._experts_prefill(shapes), held, blocks, places)

    def _prefill(self, shapes: Sequence[Shape]) -> int:
        """Rows from which on to unpack: as was said, or by what a form does; a walk costs more every time."""
        if self.prefill is not None:
            return self.prefill
        walks = [codes for shape in shapes if isinstance(codes := CODES[shape.codes], Walk) and codes.walked]
        if not walks:
            return self.form.prefill
        if all(walk.in_registers(self.form.lanes) for walk in walks):
            return self.form.prefill // 2
        most = WALKED_WITH_AVX2 if self.form.lanes == AVX2_LANES else 2 * self.form.rows[-1]
        return min(self.form.prefill, most)

    def _experts_prefill(self, shapes: Sequence[Shape]) -> int:
        """As `_prefill`, of a layer's experts: their three matrices share what tiles read, and unpacking takes longer
        than twice as many rows (an Intel CPU with AMX)."""
        rows = self._prefill(shapes)
        return TILED_PREFILL * rows if self.prefill is None and self.form.tiles else rows

    def _overflow(self, shape: Shape) -> str | None:
        """Why a form that rounds activations does not take a matrix, None if it does."""
        if not self.form.int8 or self._holds(shape, 127):
            return None
        return f"groups of {shape.group_inputs} inputs of {shape.codes} bits, more than {self.form.name} can add up"

    def _holding(self, shapes: Sequence[Shape]) -> Form:
        """The form, or that of the same vectors in float32 where its sums do not hold all groups."""
        form = self.form
        whole = [one for one in shapes if any(form_of(form, one.codes, rows).slices > 1 for rows in form.rows)]
        return form if all(self._holds(shape, 128) for shape in whole) else form.floats

    @staticmethod
    def _holds(shape: Shape, largest: int) -> bool:
        """Whether sums of whole numbers hold a group; largest: of the bytes of activations."""
        codes = CODES[shape.codes]
        return not codes.affine or largest * shape.group_inputs * codes.largest <= MOST_SUM
