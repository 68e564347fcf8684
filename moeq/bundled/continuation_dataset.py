"""The dataset of the lm-eval task `moeq_continuation`, handed over in memory.

`corpus/lm_eval_tasks/moeq_continuation.yaml` names `load` as its `custom_dataset`. A `data_files` entry would be
resolved against the working directory and copied into the user's datasets cache; this is neither.
"""

from __future__ import annotations

import json
from typing import Any

from moeq.bundled import bundled_path


def load(**_: Any) -> dict[str, Any]:
    """`{"validation": datasets.Dataset}` with rows `context`, `choices`, `gold`, `domain`; no file is written.

    lm-eval passes the task's metadata as keywords; none of it is needed.
    """
    from datasets import Dataset

    text = bundled_path("corpus/continuation_4way.jsonl").read_text("utf-8")
    return {"validation": Dataset.from_list([json.loads(line) for line in text.splitlines()])}
