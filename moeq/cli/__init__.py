"""The command line: one command a stage, no mathematics. Heavy imports are inside the commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from moeq.cli import checkpoints, ending, measures, recipes, runs, stages, usage
from moeq.version import __version__

app = typer.Typer(
    name="moeq",
    help="Makes Mixture-of-Experts models small enough to run where they don't fit.",
    cls=usage.Group,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
COMMANDS: dict[str, Callable[..., None]] = {
    "run": runs.run,
    "reparam": stages.reparam,
    "profile": stages.profile,
    "losses": stages.losses,
    "assign": stages.assign,
    "quantize": stages.quantize,
    "export": stages.export,
    "eval": measures.evaluate,
    "estimate": measures.estimate,
    "bench": measures.bench,
    "report": stages.report,
    "plan": runs.plan,
    "watch": runs.watch,
    "init": recipes.init,
    "recipe": recipes.recipe,
    "inspect": checkpoints.inspect,
    "convert": checkpoints.convert,
    "verify": checkpoints.verify,
    "sign": checkpoints.sign,
    "reproduce": checkpoints.reproduce,
    "push": checkpoints.push,
    "families": checkpoints.families,
    "generate": checkpoints.generate,
    "gc": runs.gc,
}
for _name, _command in COMMANDS.items():
    app.command(_name, cls=usage.Command)(_command)


def _version(show: bool) -> None:
    if show:
        print(f"moeq {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Makes Mixture-of-Experts models small enough to run where they don't fit."""


def main() -> None:
    """Entry point."""
    ending.run(app)
