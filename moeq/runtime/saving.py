"""Where a loaded model with packed modules may be saved."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from moeq_kernels.errors import ArtifactError


@dataclass(frozen=True)
class Saving:
    """`save_pretrained` of a model with packed modules: not into a folder that it was loaded from, of whose files
    transformers takes some away and leaves others, such as the manifest. folders: those."""

    model: Any
    folders: tuple[str, ...]

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """As transformers'; ArtifactError for such a folder."""
        if os.path.isdir(save_directory) and any(
            os.path.isdir(folder) and os.path.samefile(folder, save_directory) for folder in self.folders
        ):
            what = "the checkpoint that this model was loaded from, which saving would leave in pieces"
            raise ArtifactError(what, where=str(save_directory), do="save it into another directory")
        return type(self.model).save_pretrained(self.model, save_directory, *args, **kwargs)
