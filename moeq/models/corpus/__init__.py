"""Text (and images) to token sequences: the bundled corpus, local files, datasets on the hub; images with labels.

The same files, tokenizer, settings and seed always give the same tokens. Domains are kept apart where the files name
them: sequences are drawn in equal shares from every domain. Of large text only the places that are drawn are tokenized.
"""

from moeq.models.corpus.documents import Document, Need, documents_of, encoded, images_digest
from moeq.models.corpus.fields import Fields
from moeq.models.corpus.image_files import ImageFiles
from moeq.models.corpus.image_sequences import ImagePool, ImageSequences
from moeq.models.corpus.images import Encoder, has_processor, load_processor, opened
from moeq.models.corpus.labelled import ImageSet, ImageTask, open_image_sets
from moeq.models.corpus.mixture import Mixture, apportion, open_corpus
from moeq.models.corpus.places import RULE, Places, is_small, open_text
from moeq.models.corpus.sequences import Pool, Sequences, TextRows, join
from moeq.models.corpus.sources import (
    BUNDLED,
    DIGITS,
    LocalFile,
    Source,
    are_weighted,
    image_names,
    open_sources,
    pinned,
    sources_digest,
)

__all__ = [
    "BUNDLED",
    "DIGITS",
    "RULE",
    "Document",
    "Encoder",
    "Fields",
    "ImageFiles",
    "ImagePool",
    "ImageSequences",
    "ImageSet",
    "ImageTask",
    "LocalFile",
    "Mixture",
    "Need",
    "Places",
    "Pool",
    "Sequences",
    "Source",
    "TextRows",
    "apportion",
    "are_weighted",
    "documents_of",
    "encoded",
    "has_processor",
    "image_names",
    "images_digest",
    "is_small",
    "join",
    "load_processor",
    "open_corpus",
    "open_image_sets",
    "open_sources",
    "open_text",
    "opened",
    "pinned",
    "sources_digest",
]
