"""The sections `corpus` and `profile`: calibration text or images, and what is counted on them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moeq.recipe.sources import BUNDLED, TextSource
from moeq.recipe.types import Section


class CoverageSection(Section):
    """How far the calibration text grows for the sake of rarely chosen experts."""

    share: float = Field(0.99, gt=0, le=1, description="share of experts that must see profile.min_tokens tokens")
    max_sequences: int = Field(2048, ge=1, le=1_000_000, description="where it ends, covered or not")


class CorpusSection(Section):
    """Calibration text, cut into sequences of tokens.

    source: `bundled`, paths of .txt, .jsonl or .parquet files (also .jsonl.gz and .jsonl.zst), hub datasets, or a list
    of them. A hub dataset is written `hub:ORG/NAME`, followed where needed by `@REVISION` (branch, tag or commit; it is
    pinned to its commit), `:CONFIG` and `:SPLIT`: `hub:allenai/c4@main:en:train`, `hub:ORG/NAME::validation`. Without a
    split, train is taken. Only as many of its files are downloaded, and as many rows read, as `sequences` need. Of
    files with over a MiB of text, places are chosen first, evenly in every domain, and only those are tokenized.
    A source may also be a mapping with fields, a template, a name and a weight of its own:
    `{path: qa.jsonl, template: "{question}\\n{answer}", weight: 2}`.

    A row is text (`text_field`), a conversation (`messages_field`: a list of role and content, or of from and value)
    or a prompt and its response; conversations go through the tokenizer's chat template. chat_template: `auto` takes
    the text where a row has it and a conversation otherwise; true takes only conversations; false only text. A row with
    an image (a path relative to its file, or {bytes, path} as the hub writes it into Parquet) goes through the model's
    own processor and is a sequence of its own.

    Image classifiers calibrate on `digits` (scikit-learn's; `bundled` means the same) or on .safetensors files with
    `images`, `labels` and, where only some are to calibrate, row numbers `train` and `test`; where the model has an
    image processor also on .jsonl and .parquet files whose rows hold an image and a label, and on folders of a folder
    of images for each label. `sequences` are images, their length is the model's, what concerns text is not read.

    until_covered: the profile goes on with more sequences, doubling them, until `share` of the experts have seen
    profile.min_tokens calibration tokens; losses then uses the same sequences.
    """

    source: TextSource = Field(
        BUNDLED,
        description="bundled, files, hub:ORG/NAME, mappings of path and settings, or a list; of images digits or files",
    )
    text_field: str = Field("text", description="field of a row that holds text")
    messages_field: str = Field("messages", description="field of a row that holds a conversation")
    prompt_field: str = Field("prompt", description="field of a row that holds the user's turn")
    response_field: str = Field("response", description="field of a row that holds the answer to the prompt")
    label_field: str = Field("label", description="of image classifiers: field of a row that holds its label")
    image_field: str | None = Field("image", description="field of a row that holds its image or images; none: ignored")
    chat_template: Literal["auto", True, False] = Field("auto", description="whether rows are conversations")
    shuffle: bool = Field(
        False,
        description="draw documents (of large text, places) in an order that the seed decides, not in the files' order",
    )
    sequences: int = Field(128, ge=1, le=1_000_000, description="how many to calibrate on")
    sequence_length: int = Field(512, ge=2, le=1_000_000, description="tokens of a sequence")
    batch_size: int = Field(16, ge=1, description="sequences in one forward pass")
    packed: bool = Field(True, description="join documents and cut; false: one document a sequence, padded")
    until_covered: CoverageSection | None = Field(None, description="more sequences until the experts are covered")

    @model_validator(mode="after")
    def _check(self) -> CorpusSection:
        most = self.sequences if self.until_covered is None else self.until_covered.max_sequences
        if most < self.sequences:
            raise ValueError(f"until_covered.max_sequences is {most}, below sequences ({self.sequences})")
        return self


class ProfileSection(Section):
    prefill_fraction: float = Field(
        0.5, gt=0, lt=1, description="share of each sequence counted as prefill; of images all positions are"
    )
    min_tokens: int | None = Field(
        None, ge=1, description="an expert with fewer calibration tokens is not covered; none: losses.min_tokens"
    )
    trace: bool = Field(
        False, description="also record which experts every token chose, in profile/trace.safetensors for the estimate"
    )
