"""A vision-language checkpoint as a model of VLMEvalKit (github.com/open-compass/VLMEvalKit), for tasks lm-eval lacks.

    python -m moeq.evaluation.vlmevalkit RUN/checkpoint --kit VLMEvalKit --name mopeq -- --data MME AI2D_TEST_NO_MASK

registers the checkpoint (one that moeq exported, or an original) and starts the kit's own run.py with what follows
`--`. From Python: `vlmeval.config.supported_VLM["mopeq"] = partial(KitModel, "RUN/checkpoint")`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from moeq.errors import EvaluationError, MoeqError
from moeq.models.corpus import has_processor, load_processor, opened
from moeq.models.loading import compute_dtype, load_model, resolve_device
from moeq.models.source import open_source

MAX_NEW_TOKENS = 512
RUN = "run.py"


class KitModel:
    """What VLMEvalKit asks of a model: an answer to a message of texts and images, greedy."""

    is_api = False
    INTERLEAVE = True

    def __init__(
        self,
        path: str | Path,
        *,
        max_new_tokens: int = MAX_NEW_TOKENS,
        dtype: str = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
        **_: Any,
    ) -> None:
        """Raises ModelError for a checkpoint that cannot be loaded, EvaluationError for one that takes text only.

        Further options are the kit's own (verbose, retry).
        """
        source = open_source(str(path), trust_remote_code=trust_remote_code)
        if not has_processor(source.path):
            raise EvaluationError(
                "takes text only (it has no image processor)", where=str(path), do="give a vision-language model"
            )
        self.processor = load_processor(source.path, trust_remote_code)
        self.device = resolve_device(device)
        wanted = compute_dtype(source, dtype, self.device)
        self.model: Any = load_model(source, wanted, self.device, trust_remote_code)
        self.max_new_tokens = max_new_tokens

    def set_dump_image(self, dump_image: Callable[..., Any]) -> None:
        """How a dataset writes its images to files; its own prompts have done it already."""

    def use_custom_prompt(self, dataset: str | None) -> bool:
        """Whether prompts are the model's own; False: the dataset's."""
        return False

    def generate(self, message: Sequence[dict[str, str]] | str, dataset: str | None = None) -> str:
        """The answer to a message: a text, or parts {type: text or image, value: the text or an image file}.

        Raises EvaluationError for a part of another type, CorpusError for an image that cannot be read.
        """
        parts = [{"type": "text", "value": message}] if isinstance(message, str) else message
        where = f"VLMEvalKit, {dataset or 'a message'}"
        content, images = [], []
        for part in parts:
            if part["type"] == "image":
                content.append({"type": "image"})
                images.append(opened(Path(part["value"]), where))
            elif part["type"] == "text":
                content.append({"type": "text", "text": part["value"]})
            else:
                raise EvaluationError(
                    f"a part of type {part['type']!r}", where=where, do="use tasks of text and images"
                )
        turns = [{"role": "user", "content": content}]
        text = self.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        given = self.processor(text=[text], images=images or None, return_tensors="pt")
        given = given.to(self.device, self.model.dtype)
        tokenizer = self.processor.tokenizer
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        with torch.no_grad():
            found = self.model.generate(**given, max_new_tokens=self.max_new_tokens, do_sample=False, pad_token_id=pad)
        answer = found[0, given["input_ids"].shape[1] :]
        return str(tokenizer.decode(answer, skip_special_tokens=True))


def run_kit(kit: Path, name: str, make: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Register a model under a name and start the kit's run.py; EvaluationError where the kit is not."""
    if not (kit / RUN).is_file():
        raise EvaluationError(
            f"no {RUN}: not a checkout of VLMEvalKit",
            where=str(kit),
            do="git clone https://github.com/open-compass/VLMEvalKit, pip install it, and give its folder as --kit",
        )
    sys.path.insert(0, str(kit.resolve()))
    try:
        from vlmeval.config import supported_VLM
    except ImportError as error:
        raise EvaluationError(
            f"VLMEvalKit cannot be imported ({error})", where=str(kit), do="install its requirements"
        ) from error
    supported_VLM[name] = make
    os.chdir(kit)
    sys.argv = [RUN, "--model", name, *arguments]
    runpy.run_path(RUN, run_name="__main__")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m moeq.evaluation.vlmevalkit",
        description=__doc__,
        epilog="After --: options of the kit's run.py.",
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkpoint", help="checkpoint that moeq exported, or an original: its directory or hub id")
    parser.add_argument("--kit", type=Path, required=True, help="checkout of VLMEvalKit")
    parser.add_argument("--name", default="moeq", help="what the kit calls the model in its output")
    parser.add_argument("--max-new-tokens", type=int, default=MAX_NEW_TOKENS)
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--trust-remote-code", action="store_true")
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:cut])
    here = Path(options.checkpoint).expanduser()
    make = partial(
        KitModel,
        str(here.resolve()) if here.exists() else options.checkpoint,  # the kit starts in its own folder
        max_new_tokens=options.max_new_tokens,
        dtype=options.dtype,
        trust_remote_code=options.trust_remote_code,
    )
    try:
        run_kit(options.kit, options.name, make, given[cut + 1 :])
    except MoeqError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
