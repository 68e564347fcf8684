"""Options of commands, each declared once, as a field of a dataclass that the command receives whole.

Options that plain functions take, too, are annotated types of Typer's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import partial, wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args, get_type_hints

from typer import Argument, Option
from typer.models import ParameterInfo

from moeq.bundled.preset_files import DEFAULT, QUALITIES, chosen_preset, preset_names
from moeq.errors import RecipeError, as_named, is_utf8, name_trouble
from moeq.folders import checkpoint_of, is_run
from moeq.registry import QUANTIZERS
from moeq.runtimes import NATIVE, named, runtimes, written

if TYPE_CHECKING:
    QuantizerOrBest = str
else:
    QuantizerOrBest = Literal[*QUANTIZERS.names(), "best"]


def among(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """What a shell completes an option's value to, of names that are looked up when it asks."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


OF_A_RUN = "a run's stage"
RECIPES = (".yaml", ".yml")  # how the name of a recipe ends, where a model may stand as well
BUDGETS = "a budget"  # of which one is enough
RARE = (  # a command names them
    "for_", "device", "workers", "format", "widen", "quantizer", "refine", "tune", "verify", "force",
)  # fmt: skip
MODEL_NAMES = "Model directory, hub id, or bundled:tiny-mixtral"
BUNDLED_TEXT = "bundled"  # a text whose parts for calibration and evaluation differ
PLAIN = re.compile(r"[\w./+-]+")  # what stands in YAML without quotes
LAST = (*RARE, "check", "trust_remote_code", "probe", "json", "quiet")  # options behind all others

FORMAT = f"Runtime to write it for, too: {', '.join(written())} (export.formats); may be given several times."
CHECKPOINT = "A packed checkpoint, or the run that made it."


def checkpoint_argument(help: str = CHECKPOINT) -> Any:
    """An argument of Typer's that is a checkpoint's path: a run stands for its checkpoint."""
    return Argument(help=help, callback=checkpoint_of)


JsonOption = Annotated[bool, Option("--json", help="Result as JSON on standard output.")]
QuietOption = Annotated[bool, Option("--quiet", help="No progress, no messages but errors.")]
TrustOption = Annotated[
    bool, Option("--trust-remote-code", help="Run Python code that the model's directory brings along.")
]
DEVICES = ("auto", "cpu", "cuda")
DeviceOption = Annotated[
    str | None,
    Option(help="Where it computes: auto, cpu or cuda (device).", autocompletion=among(lambda: DEVICES)),
]
DYNAMIC = (
    "Experts change between two precisions as the workload asks for it (paper 001), under a budget: "
    "memory=24GiB,high=4,low=2,period=128, or auto."
)
DynamicOption = Annotated[str | None, Option(metavar="SETTINGS", help=DYNAMIC)]
DynamicLogOption = Annotated[
    Path | None, Option(metavar="FILE", help="With --dynamic: every decision and its sums as JSON lines.")
]
WatchOption = Annotated[
    bool, Option("--watch", help="With --dynamic: a live table of what is in high precision, on standard error.")
]
VerifyOption = Annotated[
    bool, Option("--verify/--no-verify", help="Load what was written in a fresh process and compare it.")
]
WidenOption = Annotated[
    bool, Option("--widen", help="Codes that a runtime cannot read go into wider ones of the same values.")
]


def option(help: str, *marks: str, default: Any = None, sets: str = "", **more: Any) -> Any:
    """A field that is an option, of a bool that is False by default without an opposite.

    marks: by which commands ask what was given; sets: the recipe's key that it changes; more: what Typer is told.
    """
    metadata = {"typer": partial(Option, help=help, **more), "marks": marks, "sets": sets}
    if default is list:
        return field(default_factory=list, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of the commands on a run; what a subclass declares as a plain field is no option of its command."""

    model: str | None = option(f"{MODEL_NAMES}.", OF_A_RUN)
    out: Path | None = option("Run directory [default: moeq-out/NAME of the recipe, without one of the model].")
    set_: list[str] = option("Override a key: --set assign.bits_per_weight=2.5", OF_A_RUN, default=list)
    for_: str | None = option(
        f"Runtime that is to load what is made: {', '.join(runtimes())}; sets what it needs of a recipe that does not "
        "say otherwise.",
        autocompletion=among(runtimes),
    )
    format: list[str] = option(FORMAT, default=list, autocompletion=among(written))
    device: DeviceOption = field(default=None, metadata={"sets": "device"})
    workers: int | None = option(
        "Processes that quantize experts side by side in losses, while the model runs on, and that share the text of "
        "profile and of effects and the variants of eval.",
        OF_A_RUN,
        sets="workers",
    )
    widen: WidenOption = field(default=False, metadata={"sets": "export.widen"})
    quantizer: QuantizerOrBest | None = option(
        "Whose replicas are used (assign.quantizer; losses.methods gains it); best: of losses.methods, the one that "
        "loses least."
    )
    refine: bool = option("Train the placed experts of every layer together (quantize.refine).", default=False)
    tune: bool = option("Train all scales on what the whole model answers (quantize.tune).", default=False)
    verify: VerifyOption = field(default=True, metadata={"sets": "export.verify"})
    force: bool = option("Make files anew that were edited by hand (assign/assignment.json).", default=False)
    check: bool = option("Read and hash every file, also those that have not changed since they were.", default=False)
    trust_remote_code: TrustOption = False
    json: JsonOption = False
    quiet: QuietOption = False

    def __post_init__(self) -> None:
        """RecipeError for an option without a value, and for a number that cannot be, which Typer refuses in a command
        line."""
        for option in fields(self):
            if "typer" not in option.metadata:
                continue
            least, given = option.metadata["typer"].keywords.get("min"), getattr(self, option.name)
            if given == "" or (isinstance(given, list) and "" in given):
                raise RecipeError(f"{_flag(option)} is empty", do="give a value, or leave it out")
            if least is None or given is None:
                continue
            if not isinstance(given, int) or isinstance(given, bool) or given < least:
                raise RecipeError(f"{_flag(option)} {given!r}", do=f"give a whole number from {least}")

    @property
    def recipe_path(self) -> Path | None:
        """The recipe that is named."""
        raise NotImplementedError

    @property
    def named_model(self) -> str | None:
        """The model that is named."""
        return self.model

    @property
    def preset_name(self) -> str | None:
        """The preset that is named."""
        return None

    def in_its_run(self) -> Self:
        """With --out instead of a run that is named by itself."""
        return self

    def with_run(self, run: Path, **instead: Any) -> Self:
        """With --out of a run that was named; RecipeError where another is given."""
        if self.out is not None and self.out != run:
            raise RecipeError(f"two runs: {as_named(run)} and --out {as_named(self.out)}", do="give one of them")
        return replace(self, out=run, **instead)

    def keys(self) -> dict[str, str]:
        """{key of the recipe: the option that changes it}, of those that were given."""
        return {option.metadata["sets"]: _flag(option) for option in self._given() if option.metadata.get("sets")}

    def changes(self) -> list[str]:
        """What the options change of any recipe, as --set says it; the native format is always written."""
        budgets = self.given(BUDGETS)
        if len(budgets) > 1:
            raise RecipeError(f"one budget is enough: {' or '.join(budgets)}", do="give one of them")
        set_by = [option for option in self._given() if option.metadata.get("sets")]
        for option in set_by:
            _check_text(_flag(option), getattr(self, option.name))
        keys = {option.metadata["sets"]: getattr(self, option.name) for option in set_by}
        changes = [*self.set_, *(f"{key}={_yaml(value)}" for key, value in keys.items())]
        formats = [named(name, (NATIVE, *written()), "--format") for name in self.format]
        others = [name for name in formats if name != NATIVE]
        return [*changes, *([f"export.formats=[{', '.join(others)}]"] if self.format else [])]

    def key_values(self, changes: Sequence[str]) -> dict[str, tuple[str, str]]:
        """{key of the recipe: (the option that says it, its value)} of those that were given; changes: `changes()`."""
        split = (change.partition("=") for change in changes[len(self.set_) :])
        names = {"export.formats": "--format", "eval.tasks": "--tasks", "eval.batch_size": "--batch-size"} | self.keys()
        values = {key: (names.get(key, "another option"), value) for key, _, value in split}
        if not self.verify:
            values["export.verify"] = ("--no-verify", "false")
        sections = {"--refine": self.refine, "--tune": self.tune}
        values |= {f"quantize.{name.strip('-')}": (name, "{}") for name, asked in sections.items() if asked}
        if self.quantizer is not None:
            values["assign.quantizer"] = ("--quantizer", self.quantizer)
        if self.trust_remote_code:
            values["trust_remote_code"] = ("--trust-remote-code", "true")
        return values if self.named_model is None else values | {"model": ("MODEL", json.dumps(self.named_model))}

    def given(self, mark: str) -> list[str]:
        """The options with a mark that were given, as they are written."""
        return [_flag(option) for option in self._given() if mark in option.metadata.get("marks", ())]

    def _given(self) -> Iterator[Field[Any]]:
        """Fields that are not at their defaults."""
        defaults = type(self)()
        return (field for field in fields(self) if getattr(self, field.name) != getattr(defaults, field.name))


@dataclass(frozen=True, kw_only=True)
class StageOptions(RunOptions):
    """Options of a command on one run; what: a recipe, or a model."""

    what: Annotated[
        str | None,
        Argument(
            metavar="RECIPE|MODEL|RUN",
            help=f"YAML recipe [default: the one in the run directory, else preset {DEFAULT}]; or a model: its "
            "directory, hub id, or bundled:tiny-mixtral; or a run's directory, to go on with it.",
        ),
    ] = None

    def in_its_run(self) -> Self:
        return self if self.what is None or not is_run(Path(self.what)) else self.with_run(Path(self.what), what=None)

    @property
    def recipe_path(self) -> Path | None:
        return Path(self.what) if self.what is not None and Path(self.what).suffix in RECIPES else None

    @property
    def named_model(self) -> str | None:
        what = None if self.recipe_path is not None else self.what
        if what is not None and self.model not in (None, what):
            raise RecipeError(f"two models: {what} and --model {self.model}", do="give one of them")
        return self.model or what


@dataclass(frozen=True, kw_only=True)
class BudgetOptions(StageOptions):
    """Options of a command that an assignment matters to."""

    bits: str | None = option(
        "Budget: bits stored for a weight of the experts, scales and zero points counted, such as 2.5.",
        BUDGETS,
        sets="assign.bits_per_weight",
    )
    code_bits: str | None = option(
        "Budget as papers count it: mean bits of the experts' codes alone.", BUDGETS, sets="assign.code_bits"
    )
    size: str | None = option(
        "Budget: the whole checkpoint, every file of its directory, such as 12GiB.", BUDGETS, sets="assign.size"
    )


@dataclass(frozen=True, kw_only=True)
class BuildOptions(BudgetOptions):
    """Options of a command that can do without a recipe."""

    group_size: int | None = option("Weights that share a scale; -1: whole rows.", sets="losses.group_size")
    text: list[str] = option(
        "Text to calibrate on: a file, hub:ORG/NAME, or bundled; may be given several times. What is measured stays on "
        "other text: the bundled, or --eval-text.",
        default=list,
        sets="corpus.source",
    )
    eval_text: list[str] = option(
        "Text to measure perplexity and KL on, none of it in --text; may be given several times [default: bundled].",
        default=list,
        sets="eval.perplexity.source",
    )
    quality: str | None = option(
        f"Preset of settings, from the quickest: {', '.join(QUALITIES)} [default: {DEFAULT}].",
        autocompletion=among(lambda: QUALITIES),
    )
    preset: str | None = option(
        f"The same, or a paper's method: {', '.join(preset_names())}.", autocompletion=among(preset_names)
    )

    @property
    def preset_name(self) -> str | None:
        name = chosen_preset(self.preset, self.quality)
        if name is not None and self.recipe_path is not None:
            flag = "--quality" if self.preset is None else "--preset"
            raise RecipeError(f"{flag} goes without a recipe", where=self.what, do="give one of them")
        return name

    def changes(self) -> list[str]:
        """RecipeError for a text that would be measured on after it was calibrated on."""
        if both := sorted(set(self.text) & set(self.eval_text) - {BUNDLED_TEXT}):
            do = "give a file that calibration does not read"
            raise RecipeError(
                f"{both[0]} is in --text, too: it would be measured on what it was made of", where="--eval-text", do=do
            )
        return super().changes()


Whole = TypeVar("Whole", bound=RunOptions)


def takes_options(*rare: str) -> Callable[[Callable[[Whole], None]], Callable[..., None]]:
    """A command of Typer's of a function that takes a dataclass: its options, and those rare ones that are named."""

    def command_of(function: Callable[[Whole], None]) -> Callable[..., None]:
        (whole,) = (hint for name, hint in get_type_hints(function).items() if name != "return")

        @wraps(function)
        def command(**given: Any) -> None:
            function(whole(**{name: value for name, value in given.items() if value is not None}).in_its_run())

        command.__signature__ = Signature(_parameters(whole, rare))  # type: ignore[attr-defined]
        return command

    return command_of


def _parameters(whole: type[RunOptions], rare: tuple[str, ...]) -> list[Parameter]:
    """What Typer makes options of, in the order of their help."""
    hints, parameters = get_type_hints(whole, include_extras=True), []
    for option in sorted(fields(whole), key=lambda option: LAST.index(option.name) if option.name in LAST else -1):
        hint, default = hints[option.name], None if option.default is MISSING else option.default
        if "typer" in option.metadata:
            hint = Annotated[hint, option.metadata["typer"](*([] if default is True else [_flag(option)]))]
        offered = any(isinstance(part, ParameterInfo) for part in get_args(hint))
        if offered and (option.name not in RARE or option.name in rare):
            parameters.append(Parameter(option.name, Parameter.KEYWORD_ONLY, annotation=hint, default=default))
    return parameters


def _check_text(flag: str, value: Any) -> None:
    """RecipeError for what no recipe can say, in the name of the option, which is what was given."""
    for one in value if isinstance(value, list) else [value]:
        if not is_utf8(one):
            what, do = name_trouble(one, "rename it")
            raise RecipeError(what, where=f"{flag} {one}", do=do)


def _yaml(value: Any) -> str:
    """A value as --set takes it: paths, and text in which YAML may see more than text, in quotes."""
    if isinstance(value, list | Path) or (isinstance(value, str) and not PLAIN.fullmatch(value)):
        return json.dumps(value, default=str, ensure_ascii=False)
    return str(value)


def _flag(option: Field[Any]) -> str:
    return f"--{option.name.strip('_').replace('_', '-')}"
