"""Help that fits its window, and mistakes in a command line as errors of one line with the nearest name."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from moeq.errors import RecipeError, hint, nearest
from moeq.folders import expanded

# typer has its own copy of click in newer versions: what both have is asked for by name
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
HelpFormatter: Any = typer.Context.formatter_class
NARROW = 72  # columns below which an option's help stands below it
ALIKE = 3  # first letters that make an option another one's misspelling
COLUMN, INDENT = 30, 8  # of what stands beside options, and below them
KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}
SEVERAL = re.compile(r"<list\[(.*)\]>")  # as typer shows the type of what may be given several times
EXTRA = re.compile(r"Got unexpected extra .*?\(([^()]*)\)$")
PROMPT = "prompt"  # the parameter whose values are text of their own
GIVEN = re.compile(r"(?:Value )?'(.*?)'")


class Formatter(HelpFormatter):  # type: ignore[misc]
    """Lines break between words alone: no option, path or name is torn, nothing is cut."""

    def write_text(self, text: str) -> None:
        for paragraph in text.split("\n\n"):
            lines = wrapped(" ".join(paragraph.split()), self.width - self.current_indent)
            self.write("".join(f"{' ' * self.current_indent}{line}\n" for line in lines))

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        first, *more = wrapped(f"{prefix or 'Usage: '}{prog} {args}", self.width - INDENT)
        self.write("".join(f"{line}\n" for line in (first, *(f"{' ' * INDENT}{line}" for line in more))))

    def write_dl(self, rows: Sequence[tuple[str, str]], col_max: int = COLUMN, col_spacing: int = 2) -> None:
        rows = [(_plain(name), text) for name, text in rows]
        beside = min(max(len(name) for name, _ in rows), col_max) + col_spacing + self.current_indent
        for name, text in rows:
            longest = max(map(len, text.split()), default=0)
            below = longest > self.width - beside or (self.width < NARROW and beside > self.width // 3)
            start = INDENT if below else beside
            lines = wrapped(text, self.width - start)
            head = [f"{' ' * self.current_indent}{line}" for line in wrapped(name, self.width - self.current_indent)]
            if not below and lines and len(head) == 1 and len(head[0]) + col_spacing <= beside:
                head = [head[0].ljust(beside) + lines.pop(0)]
            self.write("".join(f"{line}\n" for line in (*head, *(f"{' ' * start}{line}" for line in lines))))


def _plain(name: str) -> str:
    """An option and its type without what only programmers know."""
    several = r"<\1>" if "..." in name else r"<\1>..."
    return SEVERAL.sub(several, name.replace(" range>", ">"))


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` characters; a word that is longer is broken behind a comma or a bar."""
    words = [part for word in text.split() for part in _parts(word, width)]
    lines: list[str] = []
    for word, apart in words:
        if lines and len(lines[-1]) + apart + len(word) <= width:
            lines[-1] += " " * apart + word
        else:
            lines.append(word)
    return lines


def _parts(word: str, width: int) -> Iterator[tuple[str, bool]]:
    """Parts of a word, each with whether a space stands before it."""
    parts = re.findall(r"[^,|]+[,|]?|[,|]", word) if len(word) > width else [word]
    yield from ((part, place == 0) for place, part in enumerate(parts))


class Context(typer.Context):
    formatter_class = Formatter


class Command(TyperCommand):
    """A command of moeq."""

    context_class = Context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            if not ctx.resilient_parsing:  # a shell that completes
                _check_empty(ctx, self.make_parser(ctx).parse_args([*args])[0])
            left = super().parse_args(ctx, args)
            ctx.params |= {name: _at_home(value) for name, value in ctx.params.items()}
            return left
        except UsageError as error:
            error.ctx = getattr(error, "ctx", None) or ctx  # type: ignore[attr-defined]
            raise


class Group(TyperGroup):
    """All commands; what is wrong with a command line is a RecipeError."""

    context_class = Context

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **more: Any,
    ) -> Any:
        try:
            code = super().main(args, prog_name or "moeq", complete_var, False, windows_expand_args, **more)
        except UsageError as error:
            if type(error).__name__ != "NoArgsIsHelpError":
                raise as_ours(error) from None
            print(error, file=sys.stderr)  # the help
            code = RecipeError.exit_code
        if standalone_mode:
            sys.exit(code if isinstance(code, int) else 0)
        return code

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not ctx.resilient_parsing:
            raise RecipeError(f"unknown command {args[0]!r}", do=hint(args[0], known, "known are "))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = [(name, self.commands[name]) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, one.get_short_help_str(1000)) for name, one in rows if not one.hidden])


def _at_home(value: Any) -> Any:
    """Paths with a home in place of the ~ that a shell leaves behind `--out=`."""
    if isinstance(value, list | tuple):
        return type(value)(map(_at_home, value))
    return expanded(value) if isinstance(value, Path) else value


def _check_empty(context: Any, given: dict[str, Any]) -> None:
    """RecipeError for an empty value, as a variable that is not set leaves it: as a path it is the working directory.

    given: values as they were written, by parameter. A prompt may be empty.
    """
    for parameter in context.command.params:
        value = given.get(parameter.name)
        if parameter.name != PROMPT and (value == "" or (isinstance(value, list | tuple) and "" in value)):
            do = "give a value" if parameter.required else "give a value, or leave it out"
            raise RecipeError(f"{_name(parameter)} is empty", where=_command(context), do=do)


def _name(parameter: Any) -> str:
    """An option or an argument as a message names it."""
    option = parameter.opts[0].startswith("-")
    return str(parameter.opts[0] if option else parameter.metavar or parameter.name.upper())


def _command(context: Any) -> str | None:
    """The command that a context is of, as messages name it."""
    return None if context is None or context.parent is None else context.command_path.partition(" ")[2]


def as_ours(error: Any) -> RecipeError:
    """One of click's errors about a command line as one of ours, with the nearest name."""
    context = error.ctx
    help_ = "moeq -h" if context is None else f"{context.command_path} -h"
    where = _command(context)
    see = f"see {help_}"
    option, parameter = getattr(error, "option_name", None), getattr(error, "param", None)
    if type(error).__name__ == "NoSuchOption":
        return _unknown_option(str(option), context, where, see)
    if option is not None:
        what = "takes no value" if "does not take" in error.message else "needs a value"
        return RecipeError(f"{option} {what}", where=where, do=see)
    if parameter is None:
        extra = EXTRA.match(error.message)
        if extra is not None:
            first = next(iter(extra[1].split()), "")  # several stand apart by spaces
            return RecipeError(f"unexpected argument {first!r}", where=where, do=see)
        return RecipeError(error.message.rstrip("."), where=where, do=see)
    name = _name(parameter)
    if type(error).__name__ == "MissingParameter":
        return RecipeError(f"{name} is missing", where=where, do=_expected(parameter) or f"give it ({see})")
    return _bad_value(error, name, where, see)


def _unknown_option(option: str, context: Any, where: str | None, see: str) -> RecipeError:
    """An option that a command has not; one that others have stands behind them."""
    known = [
        name for one in context.command.get_params(context) for name in one.opts if not getattr(one, "hidden", False)
    ]
    inner = {name for one in getattr(context.command, "commands", {}).values() for name in _options(one.params)}
    close = _nearest_option(option, known)
    if close is not None or not inner:
        do = see if close is None else f"did you mean {close!r}?"
    else:
        of_others = option if option in inner else _nearest_option(option, sorted(inner))
        do = see if of_others is None else f"give {of_others} behind the command that it belongs to"
    return RecipeError(f"unknown option {option!r}", where=where, do=do)


def _options(parameters: Sequence[Any]) -> list[str]:
    """What the options among them are called, those that are hidden left out."""
    shown = (one for one in parameters if not getattr(one, "hidden", False))
    return [name for one in shown for name in (*one.opts, *one.secondary_opts) if name.startswith("-")]


def _nearest_option(option: str, known: Sequence[str]) -> str | None:
    """One that begins alike, or else the closest."""
    word, names = option.lstrip("-"), {name.lstrip("-"): name for name in known}
    alike = [name for name in names if len(word) >= ALIKE and name.startswith(word[:ALIKE])]
    close = nearest(word, alike or names) or (alike[0] if alike else None)
    return None if close is None else names[close]


def _bad_value(error: Any, name: str, where: str | None, see: str) -> RecipeError:
    """A value that an option or an argument cannot have, beside what it can."""
    given, expected = _given(error), _expected(error.param, error)
    choices = _choices(error.param)
    what = f"{name} {given!r}" if given is not None else f"{name} has no value that it takes"
    if choices:
        return RecipeError(f"{what} is no choice", where=where, do=hint(str(given), choices, "choose "))
    return RecipeError(what, where=where, do=expected or see)


def _given(error: Any) -> str | None:
    """The value as it was written, of an error that says it."""
    errors = getattr(error.__cause__, "errors", None)
    if errors is not None:
        value = errors()[0].get("input")
        return value if isinstance(value, str) else None if value is None else f"{value:g}"
    found = GIVEN.match(error.message)
    return None if found is None else found[1]


def _described(parameter: Any) -> Any:
    """What typer knows of a parameter's type."""
    return getattr(parameter, "type_descriptor", None) or parameter.type


def _choices(parameter: Any) -> list[str]:
    return [str(choice) for choice in getattr(_described(parameter), "choices", None) or ()]


def _expected(parameter: Any, error: Any = None) -> str | None:
    """What a parameter takes."""
    kind = _described(parameter)
    choices = _choices(parameter)
    if choices:
        return f"choose {', '.join(choices)}"
    bounds = getattr(kind, "parameter_info", kind)
    least, most = getattr(bounds, "min", None), getattr(bounds, "max", None)
    number = KINDS.get(getattr(kind, "annotation", None)) or ("a number" if least is not None else None)
    if number is None:
        return None
    limits = [] if least is None else [f"from {least:g}"]
    limits += [] if most is None else [f"to {most if isinstance(most, int) else f'{most:g}'}"]
    return " ".join(["give", number, *limits])


def asks_json(words: Sequence[str]) -> bool:
    """Whether --json is among the options of a command line, right or wrong as the rest may be."""
    return "--json" in (words[: words.index("--")] if "--" in words else words)
