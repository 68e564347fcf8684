"""Models and checkpoints, whatever made them: inspect, convert, verify, reproduce, push, families and generate."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from moeq.cli.ending import refuse, show
from moeq.errors import RecipeError, is_utf8
from moeq.options import (
    DeviceOption,
    DynamicLogOption,
    DynamicOption,
    JsonOption,
    QuietOption,
    TrustOption,
    VerifyOption,
    WatchOption,
    WidenOption,
    among,
    checkpoint_argument,
)
from moeq.runtimes import NATIVE, written

PROMPT_BYTES = 1 << 24  # most that is read of a prompt


def _loaders() -> list[str]:
    """Runtimes whose loaders are known, for a shell that asks."""
    from moeq.exporters.exporter import loaders

    return list(loaders())


def inspect(
    path: Annotated[Path, Argument(help="Checkpoint, run directory, model directory, or any file moeq writes.")],
    placement_for: Annotated[
        Literal["llama.cpp", "ktransformers", "sglang"] | None,
        Option(help="Say instead how this runtime is told where a native checkpoint's experts live."),
    ] = None,
    tensor_types: Annotated[
        Literal["k", "iq"] | None,
        Option(help="Say instead which types llama-quantize gives the experts at the widths assigned: k- or i-quants."),
    ] = None,
    widen: Annotated[
        bool, Option("--widen", help="With --tensor-types: a layer's matrices of several widths take the widest.")
    ] = False,
    out: Annotated[
        Path | None, Option(help="File to write: with --placement-for .pt, or .json for sglang; with --tensor-types.")
    ] = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say what a file or directory is; check a checkpoint's bytes and digests against its manifest."""
    from moeq import preflight

    preflight.check_folder(path)
    if tensor_types is not None and placement_for is not None:
        raise RecipeError("one is told at a time", where="--tensor-types", do="leave --placement-for out")
    if widen and tensor_types is None:
        raise RecipeError("nothing is widened", where="--widen", do="give --tensor-types too")
    if placement_for is not None:
        from moeq import terminal
        from moeq.exporters import placements

        show(placements.told(path, placement_for, out), terminal.print_summary, json=json, quiet=quiet)
        return
    if tensor_types is not None:
        from moeq import terminal
        from moeq.exporters import tensor_types as types

        show(types.told(path, tensor_types, out, widen=widen), terminal.print_summary, json=json, quiet=quiet)
        return
    if out is not None:
        do = "give --placement-for or --tensor-types too"
        raise RecipeError("a file, and nothing is written to it", where="--out", do=do)
    from moeq import api, terminal

    described = api.inspect(path, trust_remote_code=trust_remote_code, quiet=quiet)
    show(described, terminal.print_summary, json=json, quiet=quiet)


def convert(
    checkpoint: Annotated[Path, checkpoint_argument()],
    to: Annotated[
        str,
        Option(
            help=f"Runtime that is to load it: {', '.join((NATIVE, *written()))}.",
            autocompletion=among(lambda: (NATIVE, *written())),
        ),
    ],
    out: Annotated[Path, Option(help="Directory to write, which must not be there yet.")],
    max_shard: Annotated[str, Option(help="Largest size of a file of what is not packed, such as 2GB.")] = "5GB",
    widen: WidenOption = False,
    verify: VerifyOption = True,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write a packed checkpoint for another runtime, without calibration; codes are taken over exactly.

    For native also checkpoints of other tools: gptq, awq, auto-round, compressed-tensors, GGUF.
    """
    from moeq import api

    summary = api.convert(
        checkpoint,
        to,
        out,
        max_shard=max_shard,
        widen=widen,
        verify=verify,
        trust_remote_code=trust_remote_code,
        quiet=quiet or json,
    )
    from moeq import terminal

    show(summary, terminal.print_summary, json=json, quiet=quiet)


def verify(
    checkpoint: Annotated[
        Path, checkpoint_argument("A packed checkpoint, of moeq or of another tool, or a plain one; or a run.")
    ],
    against: Annotated[
        str | None, Option(help="Model (or packed checkpoint) that it was made of: how far it is from that.")
    ] = None,
    target: Annotated[
        str | None,
        Option(
            help="Runtime that loads it, such as transformers [default: the one that it is for].",
            autocompletion=among(_loaders),
        ),
    ] = None,
    python: Annotated[
        str | None, Option(help="Interpreter of an environment with the target's package [default: this one].")
    ] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"], Option(help="Type that the target computes in.")
    ] = "float32",
    signature: Annotated[
        bool, Option("--signature", help="First verify model.sig, over every file, with a key or roots that you trust.")
    ] = False,
    public_key: Annotated[Path | None, Option(help="Public key of who signed, in PEM.")] = None,
    certificate_chain: Annotated[
        list[Path] | None, Option(help="Certificates to trust, in PEM, up to a root (repeatable).")
    ] = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Load a checkpoint with its target's own loader in a fresh process and compare it with its weights.

    With --signature nothing is loaded before the signature is right.
    """
    from moeq import api

    verdict = api.verify(
        checkpoint,
        against=against,
        target=target,
        python=python,
        dtype=dtype,
        signature=signature,
        public_key=public_key,
        certificate_chain=certificate_chain or (),
        trust_remote_code=trust_remote_code,
        quiet=quiet or json,
    )
    from moeq import terminal
    from moeq.verification.verify import error_of

    show(verdict.as_json(), lambda _: terminal.print_verdict(verdict), json=json, quiet=quiet)
    if verdict.problems:
        refuse(error_of(verdict), json=json)


def sign(
    checkpoint: Annotated[Path, checkpoint_argument()],
    key: Annotated[Path, Option(help="Private key of an elliptic curve (P-256, P-384, P-521), in PEM.")],
    certificate: Annotated[Path | None, Option(help="Certificate of this key, in PEM.")] = None,
    certificate_chain: Annotated[
        list[Path] | None, Option(help="Certificates of who issued it, in PEM (repeatable).")
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Sign every file of a checkpoint with a key, into model.sig beside them; needs pip install 'moeq[sign]'.

    An encrypted key's passphrase is asked for, or taken from MOEQ_KEY_PASSPHRASE. Nothing goes over a network.
    """
    from moeq import preflight

    preflight.check_checkpoint(checkpoint)
    from moeq import signing

    signer = signing.Signer(key=key, certificate=certificate, chain=certificate_chain or ())
    signing.check_signer(checkpoint, signer)
    done = signing.sign(checkpoint, signer)
    from moeq import terminal

    show(done, terminal.print_summary, json=json, quiet=quiet)


def reproduce(
    checkpoint: Annotated[
        Path, checkpoint_argument("A checkpoint that a run of moeq made, with its provenance.json; or the run.")
    ],
    model: Annotated[str, Option(help="The model that it was made of: directory, hub id, or bundled:tiny-mixtral.")],
    text: Annotated[
        list[str] | None,
        Option(
            help="A text that it was calibrated on, by any name; may be given several times. Bundled ones need none."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        Option(help="Run directory to make it in [default: CHECKPOINT.reproduced, which goes when all is equal]."),
    ] = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Make a checkpoint again from its provenance and compare the bytes; what is not equal is told with how far it is.

    Model and texts are known by their digests: other ones are refused. Equal bytes need the same versions and kind of
    machine; what is different here is said.
    """
    from moeq import api

    found = api.reproduce(
        checkpoint, model=model, texts=text or (), out=out, trust_remote_code=trust_remote_code, quiet=quiet
    )
    show(found.as_json(), lambda _: print(*found.lines(), sep="\n"), json=json, quiet=quiet)
    if not found.is_equal:
        refuse(found.error(), json=json)


def push(
    checkpoint: Annotated[Path, checkpoint_argument()],
    name: Annotated[str, Argument(metavar="HUB_ID", help="USER/NAME on the hub; made where it is not there.")],
    private: Annotated[bool, Option("--private", help="Seen by its owners only.")] = False,
    branch: Annotated[str, Option("--branch", "--revision", help="Branch, made where it is not there.")] = "main",
    replace: Annotated[
        bool, Option("--replace", help="Remove what else the branch holds, such as other weights.")
    ] = False,
    verify: Annotated[bool, Option("--verify/--no-verify", help="Load it first in a fresh process.")] = True,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Verify a checkpoint and upload it with its card and digests to the hub; goes on where it broke off."""
    from moeq import preflight

    preflight.check_push(checkpoint, name)
    from moeq.models import hub_upload

    hub_upload.check_token()
    from moeq import publishing, terminal
    from moeq.progress import Reporter

    options = publishing.Options(
        private=private, branch=branch, replace=replace, verify=verify, trust_remote_code=trust_remote_code
    )
    done = publishing.push(checkpoint, name, options, Reporter(quiet=quiet or json))
    show(done, terminal.print_summary, json=json, quiet=quiet)


def families(
    name: Annotated[
        str | None,
        Argument(help="A model (directory, config.json or hub id), or part of a model_type or class, such as qwen3."),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Say whether a model is one that works; list the families: which stream, quantize, export and load."""
    from dataclasses import asdict

    from moeq import suitability, terminal
    from moeq.models import support

    answered, dense = None, False
    if name is not None and suitability.is_model(name):
        answered = suitability.of_model(name)
    elif name is not None:
        dense = (answered := suitability.of_dense_type(name)) is not None and support.has(name)
    if answered is not None and not dense:
        show(answered, lambda _: print(*suitability.lines_of(answered), sep="\n"), json=json, quiet=quiet)
        return
    rows = support.families(name)
    found = {"families": [asdict(row) | {"runtimes": suitability.runtimes_of(row)} for row in rows], "dense": dense}
    show(found, lambda _: terminal.print_families(rows), json=json, quiet=quiet)
    if dense and not (json or quiet):
        print(f"{name} itself is dense: it has no experts")


def generate(
    checkpoint: Annotated[Path, checkpoint_argument()],
    prompt: Annotated[
        list[str], Argument(help="Text to continue; - reads it from standard input; several are continued together.")
    ],
    max_new_tokens: Annotated[int, Option(min=1, help="Length of the continuation.")] = 64,
    beams: Annotated[int, Option(min=1, help="Beams of the search for the likeliest text; 1: none.")] = 1,
    temperature: Annotated[float, Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    seed: Annotated[int, Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
    chat: Annotated[
        bool,
        Option(
            "--chat",
            help="The prompt is a user's turn: the tokenizer's chat template writes it, and only the "
            "answer is printed.",
        ),
    ] = False,
    dynamic: DynamicOption = None,
    dynamic_log: DynamicLogOption = None,
    watch: WatchOption = False,
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Continue a prompt with an exported checkpoint: a first look at what came out.

    The prompt's tokens are those of the tokenizer alone, as `tokenizer(prompt)` gives them: with a first token (BOS)
    where it adds one. The options alone say how tokens are chosen, generation_config.json which ones end a text. Of
    several prompts those that are finished reach no expert while the others go on. Files that changed since the export
    are refused.
    """
    from moeq import preflight
    from moeq.models.source import check_there

    preflight.check_checkpoint(checkpoint)
    check_there(str(checkpoint))
    preflight.check_device(device or "auto")
    preflight.check_temperature(temperature)
    following = preflight.check_dynamic(dynamic, checkpoint, dynamic_log, watch)
    prompts = [_standard_input() if text == "-" else _text(text) for text in prompt]
    from moeq import generation
    from moeq.progress import Reporter

    continued = generation.generate(
        checkpoint,
        prompts if len(prompts) > 1 else prompts[0],
        beams=beams,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        dynamic=following,
        device=device or "auto",
        trust_remote_code=trust_remote_code,
        reporter=Reporter(quiet=quiet or json),
    )
    answers = continued.get("answers", [continued])
    shown = [answer["continuation" if chat else "text"] for answer in answers]
    show(continued, lambda _: print(*shown, sep="\n\n"), json=json, quiet=quiet)


def _text(prompt: str) -> str:
    """A prompt; RecipeError where its bytes are no text, which Python keeps as halves of surrogate pairs."""
    if not is_utf8(prompt):
        raise RecipeError("no UTF-8 text", where="PROMPT", do="give text, in a locale that has its characters")
    return prompt


def _standard_input() -> str:
    """The text on standard input, without the end of its last line; RecipeError where it is no text."""
    data = sys.stdin.buffer.read(PROMPT_BYTES + 1)
    if len(data) > PROMPT_BYTES:
        raise RecipeError(f"longer than {PROMPT_BYTES} bytes", where="standard input", do="shorten the prompt")
    try:
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        raise RecipeError("no UTF-8 text", where="standard input", do="give text") from None
