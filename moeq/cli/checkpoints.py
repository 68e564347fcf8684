"""Models and checkpoints, whatever made them: inspect, convert, verify, families and generate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from moeq.cli.ending import refuse, show
from moeq.options import JsonOption, QuietOption, TrustOption, VerifyOption, WidenOption
from moeq.registry import converted

if TYPE_CHECKING:  # mypy takes no Literal of what the registry has
    Format = str
else:
    Format = Literal[converted()]


def inspect(
    path: Annotated[Path, Argument(help="Checkpoint, run directory, model directory, or any file moeq writes.")],
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Say what a file or directory is; check a checkpoint's bytes and digests against its manifest."""
    from moeq import preflight

    preflight.check_path(path)
    from moeq import inspection, terminal
    from moeq.progress import Reporter

    show(inspection.inspect(path, Reporter(), trust_remote_code), terminal.print_summary, json=json)


def convert(
    checkpoint: Annotated[Path, Argument(help="A packed checkpoint.")],
    to: Annotated[Format, Option(help="The format to write.")],
    out: Annotated[Path, Option(help="Directory to write, which must not be there yet.")],
    widen: WidenOption = False,
    verify: VerifyOption = True,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a packed checkpoint in another format, without calibration; codes are taken over exactly."""
    from moeq import preflight
    from moeq.models.source import check_there

    preflight.check_absent(out)
    if not checkpoint.is_file():
        check_there(str(checkpoint))
    from moeq import conversion, terminal
    from moeq.progress import Reporter

    reporter = Reporter(quiet=quiet or json) if verify else None
    summary = conversion.convert(checkpoint, to, out, widen=widen, trust_remote_code=trust_remote_code, verify=reporter)
    show(summary, terminal.print_summary, json=json, quiet=quiet)


def verify(
    checkpoint: Annotated[Path, Argument(help="A packed checkpoint, of moeq or of another tool, or a plain one.")],
    against: Annotated[
        str | None, Option(help="Model (or packed checkpoint) that it was made of: how far it is from that.")
    ] = None,
    target: Annotated[
        str | None, Option(help="Whose loader is used, such as transformers [default: the one that the format is for].")
    ] = None,
    python: Annotated[
        str | None, Option(help="Interpreter of an environment with the target's package [default: this one].")
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], Option(help="Type that the target computes in.")
    ] = "float32",
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Load a checkpoint with its target's own loader in a fresh process and compare it with its weights."""
    from moeq import preflight
    from moeq.models.source import check_there

    preflight.check_directory(checkpoint)
    preflight.check_loader(target)
    if against is not None:
        check_there(against)
    from moeq import terminal
    from moeq.progress import Reporter
    from moeq.verification import verify as verification

    options = verification.Options(
        target=target, python=python, against=against, dtype=dtype, trust_remote_code=trust_remote_code
    )
    verdict = verification.verify(checkpoint, options, Reporter(quiet=quiet or json))
    show(verdict.as_json(), lambda _: terminal.print_verdict(verdict), json=json, quiet=quiet)
    if verdict.problems:
        refuse(verification.error_of(verdict), json=json)


def families(
    name: Annotated[
        str | None,
        Argument(help="A model (directory, config.json or hub id), or part of a model_type or class, such as qwen3."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Say whether a model is one that works; list the families: which stream, quantize, export and load."""
    from dataclasses import asdict

    from moeq import suitability, terminal
    from moeq.models import support

    answered = None
    if name is not None:
        answered = suitability.of_model(name) if suitability.is_model(name) else suitability.of_dense_type(name)
    if answered is not None:
        show(answered, lambda _: print(*suitability.lines_of(answered), sep="\n"), json=json)
        return
    rows = support.families(name)
    found = {"families": [asdict(row) | {"formats": suitability.formats_of(row)} for row in rows]}
    show(found, lambda _: terminal.print_families(rows), json=json)


def generate(
    checkpoint: Annotated[Path, Argument(help="A checkpoint that moeq exported.")],
    prompt: Annotated[str, Argument(help="Text to continue.")],
    max_new_tokens: Annotated[int, Option(min=1, help="Length of the continuation.")] = 64,
    temperature: Annotated[float, Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, Option(min=0, help="Seed of the sampling.")] = 0,
    device: Annotated[str, Option(help="auto, cpu or cuda.")] = "auto",
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
) -> None:
    """Continue a prompt with an exported checkpoint: a first look at what came out."""
    from moeq import preflight
    from moeq.models.source import check_there

    preflight.check_checkpoint(checkpoint)
    check_there(str(checkpoint))
    preflight.check_device(device)
    from moeq import generation

    continued = generation.generate(
        checkpoint,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    show(continued, lambda _: print(continued["text"]), json=json)
