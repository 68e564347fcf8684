"""The section `assign`, also the shape of an entry of `eval.compare`: how bits and places are decided.

An allocator says which of the keys of `SHARED` it reads, and declares those that are its own (`MethodSettings`). Both
stand in the section beside those that every method has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from fractions import Fraction
from typing import Any, Literal, Self

from pydantic import (
    Field,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializationInfo,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic import SerializerFunctionWrapHandler as Serializer
from pydantic.fields import FieldInfo

from moeq.errors import RecipeError
from moeq.recipe.choices import BitsOrFull, QuantizerOrBest, Target
from moeq.recipe.types import Bytes, Rational, Section, Speed, check_named
from moeq.registry import ALLOCATORS

DEFAULT_METHOD, DEFAULT_BITS_PER_WEIGHT, DEFAULT_QUANTIZER = "optimal", 2.25, "gptq"
UNLIMITED_BITS = 17  # a weight: what a speed alone leaves
BUDGETS = ("bits_per_weight", "code_bits", "expert_bytes", "size")  # how much may be spent
MOST_BITS = 32  # that a weight takes in any checkpoint
TIMES = ("ndp_latency_ms", "speed")  # how long it may take, one of them
SHARED = (*BUDGETS, "widths", "drop", "scope", "granularity", *TIMES, "trace", "trace_samples")


class MethodSettings(Section):
    """Keys of one method's own, with their defaults; a method that has none has this."""

    def named(self) -> set[int]:
        """Widths that these keys name or stand for, 16 among them."""
        return set()


class AssignSection(Section):
    """How bits and places are decided; also the shape of an entry of eval.compare.

    Without a budget, methods that count stored bits have 2.25 a weight, and an entry of eval.compare has that of
    assign, where its method takes it.
    """

    method: str = Field(DEFAULT_METHOD, description="what decides which expert gets which width")
    bits_per_weight: Rational | None = Field(
        None,
        description="a budget: bits stored for a weight of the experts on NDP, with scales, zero points and biases; "
        "within a target that has blocks of its own (llama.cpp) those of its file, as all budgets of bytes",
    )
    code_bits: Rational | None = Field(
        None,
        description="a budget as papers count it: mean bits of the codes alone of the experts on NDP",
    )
    expert_bytes: Bytes | None = Field(
        None, description="a budget: bytes of all experts, with scales, zero points and experts in full precision"
    )
    size: Bytes | None = Field(
        None,
        description="a budget: bytes of the whole checkpoint, every file of its directory: of the native one, or of "
        "one for a target in AutoGPTQ's layout (gptqmodel, auto-round) or with blocks of its own (llama.cpp)",
    )
    widths: list[BitsOrFull] | None = Field(None, description="widths to choose from; none: losses.bits")
    drop: bool | None = Field(
        None,
        description="whether an expert may have no bits at all and answer nothing, where that loses least; within a "
        "target that has no such experts none is dropped",
    )
    scope: Literal["layer", "model"] | None = Field(None, description="what a budget or a clustering spans")
    granularity: Literal["expert", "projection", "layer"] | None = Field(
        None,
        description="what has one width; projection: every matrix of an expert (needs losses.per_projection); none: "
        "expert, or what the target takes",
    )
    ndp_latency_ms: float | None = Field(
        None,
        gt=0,
        description="a limit beside the budget, on the expected milliseconds a decoded token that the near-data side "
        "spends on experts",
    )
    speed: Speed | None = Field(
        None,
        description="a limit beside the budget: tokens a second of one sequence in decode that the estimator gives the "
        "assignment on the hardware, such as 20 or 20tok/s",
    )
    hardware: str | None = Field(
        None,
        description="a preset's name or the path of a hardware YAML file, whose NDP latency is shown; none: "
        "estimate.hardware where ndp_latency_ms or speed is set",
    )
    trace: Literal["closed", "rademacher", "gaussian"] | None = Field(
        None, description="the Hessian trace in closed form (none), or sampled as MoPEQ does"
    )
    trace_samples: int | None = Field(None, ge=1, description="samples of a matrix; none: 32")
    target: Target | None = Field(None, description="runtime that must be able to load the assignment")
    gpu_experts: int = Field(0, ge=0, description="K: experts a layer kept on the GPU in full precision")
    alpha: float = Field(0.5, ge=0, le=1, description="importance = alpha*P~ + (1-alpha)*W~")
    selector: bool = Field(
        True, description="false: Fan et al.'s ablation of prefix-split, without its bit-width selector"
    )
    loss_weighting: Literal["mass", "squared", "effect", "none"] = Field(
        "mass",
        description="mass: losses times the expert's share of the routing weight; squared: errors times squared "
        "routing weights; effect: what the expert alone does to the output (losses.expert_effects); none: losses as "
        "paper 000 prints them",
    )
    layer_weighting: Literal["measured"] | None = Field(
        None, description="measured: layers count by losses.layer_effects; none: all alike"
    )
    normalization: Literal["sum", "max"] = Field("sum", description="what ~ divides by")
    statistics: Literal["all", "prefill", "decode"] = Field("all", description="which positions' routing counts")
    quantizer: QuantizerOrBest = Field(
        DEFAULT_QUANTIZER,
        description="whose losses decide and whose replicas are used; best: of each expert and width, the method of "
        "losses.methods with the lowest held-out loss",
    )
    _settings: MethodSettings = PrivateAttr()

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """With the keys of the method's own."""
        yield from super().__repr_args__()
        yield from self.settings.__repr_args__()

    @classmethod
    def of(cls, method: str, **keys: Any) -> Self:
        """The section of a method; ValidationError for keys that do not go together."""
        return cls.model_validate({"method": method, **keys})

    @property
    def settings(self) -> MethodSettings:
        """The keys of the method's own."""
        return self._settings

    @property
    def allocator(self) -> Any:
        """The Allocator that is named."""
        return ALLOCATORS.get(self.method)

    def named(self) -> set[int]:
        """Widths that the section names or stands for, 16 among them."""
        return {*(self.widths or self.allocator.implied.get("widths", ())), *self.settings.named()}

    @classmethod
    def every_key(cls) -> dict[str, FieldInfo]:
        """With the keys of every method, and whose they are in their descriptions."""
        own = {key: field for method in ALLOCATORS for key, field in method.settings.model_fields.items()}
        keys = {key: _told(key, field) for key, field in (cls.model_fields | own).items()}
        keys["method"].annotation = Literal[ALLOCATORS.names()]  # type: ignore[assignment]
        return keys

    @field_validator("method")
    @classmethod
    def _check_method(cls, name: str) -> str:
        try:
            ALLOCATORS.get(name)
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return name

    @model_validator(mode="wrap")
    @classmethod
    def _split(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Keys that are not of every method become its settings; null of another method's counts as not given."""
        if not isinstance(data, dict):
            return handler(data)
        if taken_by(data)[:1] == ("bits_per_weight",) and not set(budget_keys()) & set(data):
            alone = UNLIMITED_BITS if data.get("speed") is not None else DEFAULT_BITS_PER_WEIGHT
            data = {"bits_per_weight": alone} | data
        section = handler({key: value for key, value in data.items() if key in cls.model_fields})
        own = {key: value for key, value in data.items() if key not in cls.model_fields}
        method = section.allocator
        unknown = {key: value for key, value in own.items() if not owners(key)}
        if unknown:
            method.settings.model_validate(unknown)
        for key, value in {**{key: getattr(section, key) for key in SHARED}, **own}.items():
            methods = owners(key)
            if value is None and methods:
                own.pop(key, None)
            elif methods and method.name not in methods:
                takes = f"; {method.name} takes {either(method.budgets)}" if method.budgets else ""
                raise ValueError(f"{key} belongs to {either(methods)}{takes if key in budget_keys() else ''}")
        section._settings = method.settings.model_validate({key: own[key] for key in own if key not in SHARED})
        section._check()
        return section

    def _check(self) -> None:
        budgets = self.allocator.budgets
        given = [key for key in budgets if getattr(self if key in BUDGETS else self.settings, key) is not None]
        if budgets and not given:
            raise ValueError(f"method {self.method} needs {either(budgets)}")
        if len(given) > 1:
            raise ValueError(f"one budget is enough: give {either(given)}")
        if not self.selector and "selector" not in self.allocator.weighs:
            those = [method.name for method in ALLOCATORS if "selector" in method.weighs]
            raise ValueError(f"selector: false belongs to {either(those)}, not to {self.method}")
        if self.widths is not None:
            check_named("widths", self.widths)
        if self.loss_weighting == "effect" and self.layer_weighting is not None:
            raise ValueError("loss_weighting effect compares layers by itself: it goes without layer_weighting")
        for key in TIMES:
            if getattr(self, key) is not None and self.scope == "layer":
                raise ValueError(f"{key} is one limit for all layers: it needs scope model")
        if self.ndp_latency_ms is not None and self.speed is not None:
            raise ValueError("ndp_latency_ms and speed each limit the time; give one of them")
        average = None if self.code_bits is None else Fraction(self.code_bits)
        stored = None if self.bits_per_weight is None else Fraction(self.bits_per_weight)
        known = self.named() or self.allocator.widths
        low, high = 0 if self.drop else min(known, default=1), max(known, default=16)
        if average is not None and not low <= average <= high:
            raise ValueError(f"code_bits must lie between {low} and {high}, not {self.code_bits}")
        if stored is not None and not low <= stored <= MOST_BITS:
            raise ValueError(f"bits_per_weight must lie between {low} and {MOST_BITS}, not {self.bits_per_weight}")
        if not self.selector and (average is None or average not in (1, 2, 3, 4)):
            raise ValueError("selector off gives every NDP expert the same width: code_bits must be 1, 2, 3 or 4")

    @model_serializer(mode="wrap")
    def _flat(self, handler: Serializer, info: SerializationInfo) -> dict[str, Any]:
        """Settings beside the others, as recipes have them, null where they are not given or of moeq's other methods.

        A digest of a section then does not depend on which other packages there are.
        """
        if not isinstance(self, AssignSection):  # a copy's that was given a plain mapping
            return handler(self)  # type: ignore[unreachable]
        own = self.settings.model_dump(mode=info.mode, exclude_unset=True)
        every = [key for name in ALLOCATORS.own for key in ALLOCATORS.get(name).settings.model_fields]
        own = dict.fromkeys([*every, *type(self.settings).model_fields]) | own
        dropped = info.exclude_none or info.exclude_unset
        shared: dict[str, Any] = handler(self)
        return shared | {key: value for key, value in own.items() if value is not None or not dropped}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """With the keys of every method, which may be null where the method is another."""
        schema: dict[str, Any] = handler(core_schema)
        keys: dict[str, Any] = {}
        for key, field in cls.every_key().items():
            kind: Any = field.annotation
            keys[key] = (kind if key in cls.model_fields else kind | None, field)
        every = create_model("Keys", **keys).model_json_schema()["properties"]
        handler.resolve_ref_schema(schema)["properties"] = every
        return schema


class NamedAssignSection(AssignSection):
    name: str = Field(min_length=1, max_length=40, pattern=r"^[\w.+-]+$", description="of the row, in tables and files")


def either(names: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def taken_by(data: dict[str, Any]) -> tuple[str, ...]:
    """The budgets of the method that an unread section names; none of a method that there is not."""
    named = data.get("method", DEFAULT_METHOD)
    return getattr(ALLOCATORS.find(named), "budgets", ()) if isinstance(named, str) else ()


def with_budget_of(assign: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """An unread section that is compared, at the budget of the recipe's own if it has none and its method takes that.

    A speed alone is no budget, and one that has it is held to nothing else.
    """
    if set(budget_keys()) & set(data) or data.get("speed") is not None:
        return data
    return {key: assign[key] for key in taken_by(data) if assign.get(key) is not None} | data


def budget_keys() -> dict[str, None]:
    """Every key that is a budget of some method."""
    return dict.fromkeys(key for method in ALLOCATORS for key in method.budgets)


def owners(key: str) -> list[str]:
    """The methods that read a key which not all do; none for one that all read, or that there is not."""
    return [
        method.name for method in ALLOCATORS if key in (*method.budgets, *method.reads, *method.settings.model_fields)
    ]


def _told(key: str, field: FieldInfo) -> FieldInfo:
    """A key with the methods that read it in its description, and what it stands for in each."""
    implied = [
        f"{str(method.implied[key]).strip('()').lower()} for {method.name}"
        for method in ALLOCATORS
        if key in method.implied
    ]
    text = "; none: ".join([str(field.description), *([", ".join(implied)] if implied else [])])
    told = copy(field)
    told.description = f"{', '.join(owners(key))}: {text}" if owners(key) else field.description
    return told
