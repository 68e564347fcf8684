"""The integer forward: equal to its simulation in every value, near the float model, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from integer_models import KINDS, made, pixels
from torch import Tensor, nn
from torch.nn import functional

from moeq.errors import ModelError, NotFiniteError, QuantizationError, RecipeError
from moeq.integers.forward.description import Linear, Mlp, ViT, describe
from moeq.integers.forward.program import Program, pixel_codes
from moeq.integers.forward.reference import check_description, folded, forward, measured
from moeq.integers.forward.run import run
from moeq.integers.forward.schemes import float_logits, program_of, quality, simulated_logits
from moeq.integers.forward.simulate import simulate
from moeq.recipe import IntegerSection, load_recipe

TASK = {"tasks": 1}
CONFIGURATIONS = {
    "8/8/4": IntegerSection(),
    "8/8/8": IntegerSection(attention=8),
    "6/6/4": IntegerSection(weights=6, activations=6),
    "4/8/4": IntegerSection(weights=4),
    "exact denominator": IntegerSection(denominator="exact"),
    "log2": IntegerSection(softmax="log2"),
    "uniform": IntegerSection(softmax="uniform"),
    "uniform 8/8/8": IntegerSection(softmax="uniform", attention=8),
    "percentile": IntegerSection(range="percentile", percentile=99.0),
}
CASES = [(kind, "8/8/4") for kind in KINDS] + [
    ("moe", "8/8/8"), ("moe", "6/6/4"), ("moe", "4/8/4"), ("moe", "exact denominator"), ("moe", "percentile"),
    ("tasks", "uniform"), ("deit", "log2"), ("vit", "uniform 8/8/8"),
]  # fmt: skip


def described(kind: str) -> tuple[ViT, Tensor]:
    model = made(kind)
    return describe(model, TASK.get(kind, 0)), pixels(model, 24)


def lowered(kind: str, section: IntegerSection) -> tuple[Program, Tensor]:
    vit, images = described(kind)
    return program_of(vit, images, section), images


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_computes_what_its_model_does(kind: str) -> None:
    model = made(kind)
    images = pixels(model, 8)
    task = TASK.get(kind, 0)
    with torch.no_grad():
        logits = model(images, **({"task": task} if kind == "tasks" else {})).logits
    vit = describe(model, task)
    assert check_description(vit, images, logits) < 1e-5
    fold, scales = folded(vit, images, 8, None)
    torch.testing.assert_close(float_logits(fold, images), float_logits(vit, images), rtol=1e-9, atol=1e-9)
    assert sorted(scales) == [f"blocks.{block}.norm{side}" for block in (0, 1) for side in (1, 2)]
    with pytest.raises(ModelError, match="the model computes something else than its description"):
        check_description(vit, images, logits + 0.01 * logits.norm())


@pytest.mark.cases(11)
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_integers_and_simulation_agree_in_every_value(kind: str, name: str) -> None:
    program, images = lowered(kind, CONFIGURATIONS[name])
    codes = pixel_codes(program, images)
    found, wanted = run(program, codes), simulate(program, codes)
    assert set(found) == set(wanted) == set(program.values)
    for value, tensor in found.items():
        assert tensor.dtype == torch.int64
        assert torch.equal(tensor.double(), wanted[value].double()), value
        held = program.values[value]
        low, high = (-(2 ** (held.bits - 1)), 2 ** (held.bits - 1) - 1) if held.signed else (0, 2**held.bits - 1)
        assert low <= int(tensor.min()), value
        assert int(tensor.max()) <= high, value
    assert all(tensor.dtype == torch.int64 for tensor in program.constants.values())


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_near_the_float_model(kind: str) -> None:
    vit, images = described(kind)
    reference = float_logits(vit, images)
    labels = reference.argmax(-1)
    errors = {}
    for name in ("8/8/4", "uniform 8/8/8", "4/8/4"):
        logits = simulated_logits(program_of(vit, images, CONFIGURATIONS[name]), images)
        errors[name] = quality(logits, reference, labels).logit_error
    assert errors["uniform 8/8/8"] < 0.12
    assert errors["8/8/4"] < 0.25
    assert errors["8/8/4"] < errors["4/8/4"] < 0.7


def test_real_factors_differ_little() -> None:
    program, images = lowered("moe", CONFIGURATIONS["8/8/4"])
    codes = pixel_codes(program, images)
    exact, real = simulate(program, codes), simulate(program, codes, exact=False)
    share = float((exact["blocks.0.norm1"] != real["blocks.0.norm1"]).double().mean())
    assert 0 <= share < 0.05
    assert float((exact["logits"] - real["logits"]).norm() / real["logits"].norm()) < 0.1
    assert not torch.equal(exact["blocks.0.attention.row"], real["blocks.0.attention.row"])


def test_norm_codes_after_the_fold_are_those_of_channel_quantizers() -> None:
    """What the fold is for: the integer LayerNorm gives asymmetric codes a channel, shifted by 128."""
    vit, images = described("moe")
    seen: dict[str, Tensor] = {}
    forward(vit, images, lambda name, values: seen.setdefault(name, values))
    program = program_of(vit, images, IntegerSection())
    found = run(program, pixel_codes(program, images))
    low, high = (seen["blocks.0.norm1"].flatten(0, -2).aminmax(dim=0)[end] for end in (0, 1))
    scale = (high - low) / 255
    held, norm = program.values["tokens"].scale, vit.blocks[0].norm1
    assert held is not None
    real = functional.layer_norm(found["tokens"].double() * held, (24,), norm.weight, norm.bias, norm.epsilon)
    wanted = (real / scale + (-low / scale).round()).round().clamp(0, 255) - 128
    apart = (found["blocks.0.norm1"] - wanted).abs()
    assert float((apart > 0).double().mean()) < 0.005
    assert float(apart.max()) <= 1


def test_an_image_gives_the_same_alone_and_among_others() -> None:
    vit, images = described("moe")
    program = program_of(vit, images, IntegerSection())
    one = run(program, pixel_codes(program, images[:1]))
    all_of_them = run(program, pixel_codes(program, images))
    for name, values in one.items():
        assert torch.equal(values, all_of_them[name][:1]), name


def test_equal_router_logits_choose_the_first_expert() -> None:
    vit, images = described("moe")
    update = vit.blocks[1].update
    assert not isinstance(update, Mlp)
    flat = Linear(weight=torch.zeros_like(update.router.weight), bias=torch.ones_like(update.router.bias))
    block = replace(vit.blocks[1], update=replace(update, router=flat))
    program = program_of(replace(vit, blocks=(vit.blocks[0], block)), images, IntegerSection(), {})
    found = run(program, pixel_codes(program, images))
    assert found["blocks.1.router.index"].unique(dim=-2).flatten().unique().tolist() == [0, 1]
    assert found["blocks.1.router.weights"].unique().tolist() == [2**14]


def test_percentiles_cut_ranges_but_not_those_of_sums() -> None:
    vit, images = described("moe")
    whole, cut = measured(vit, images, None), measured(vit, images, 90.0)
    assert set(whole) == set(cut)
    assert cut["blocks.0.query"] < whole["blocks.0.query"]
    assert (cut["residual"], cut["logits"], cut["pixels"]) == (whole["residual"], whole["logits"], whole["pixels"])


def test_sums_that_32_bits_cannot_hold_are_refused() -> None:
    vit, images = described("plain")
    wide = 140_000
    up = Linear(weight=torch.randn(wide, 24).double(), bias=torch.zeros(wide).double())
    down = Linear(weight=torch.ones(24, wide).double(), bias=torch.zeros(24).double())
    update = vit.blocks[0].update
    assert isinstance(update, Mlp)
    block = replace(vit.blocks[0], update=replace(update, up=up, down=down))
    with pytest.raises(QuantizationError, match=r"blocks\.0\.down\.weight: a sum of products can reach 2,2.*32 bits"):
        program_of(replace(vit, blocks=(block,)), images[:1], IntegerSection(), {})


def test_what_is_no_vision_transformer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Linear has no integer forward; known are moe_vit, ViTFor"):
        describe(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="task 2 of a model with 2; give 0 to 1"):
        describe(made("tasks"), 2)
    with pytest.raises(ModelError, match="task 1 of a model with 1"):
        describe(made("vit"), 1)


def test_bad_images_are_refused() -> None:
    program, images = lowered("moe", IntegerSection())
    with pytest.raises(QuantizationError, match=r"images are \[1, 1, 8, 8\], \[images, 1, 6, 6\] are wanted"):
        pixel_codes(program, torch.zeros(1, 1, 8, 8))
    for wrong in (images + 0.01, images - 1, images + 17):
        with pytest.raises(QuantizationError, match=r"no whole multiples of pixel_scale 0\.0625 under 256"):
            pixel_codes(program, wrong)
    with pytest.raises(QuantizationError, match="a pixel is not finite"):
        pixel_codes(program, images / 0)
    vit, _ = described("moe")
    with pytest.raises(QuantizationError, match="pixels is always zero in calibration"):
        measured(vit, torch.zeros_like(images), None)
    with pytest.raises((QuantizationError, NotFiniteError)):
        program_of(vit, images * float("nan"), IntegerSection())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("weights=9", "reparam.integer.weights is 9; give 8 or less"),
        ("attention=1", "reparam.integer.attention is 1; give 2 or more"),
        ("softmax=log3", "reparam.integer.softmax is 'log3'; did you mean 'log2'"),
        ("denominator=none", "reparam.integer.denominator is 'none'; give 'quantized' or 'exact'"),
        ("vectors=0", "reparam.integer.vectors is 0; give 1 or more"),
    ],
)
def test_a_section_out_of_bounds_is_refused(wrong: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_recipe(None, [f"reparam.integer.{wrong}"])
