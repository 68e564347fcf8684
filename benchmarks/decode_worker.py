"""What loading a packed checkpoint takes in a process that does nothing else: a line of JSON for benchmarks/decode.py.

    python decode_worker.py CHECKPOINT

Bytes of resident memory before, at the highest while it was loaded, when it was, and when every page of its tensors had
been read; anonymous and mapped pages together.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import moeq  # noqa: F401  sets OMP_WAIT_POLICY before torch is imported

from figures import Peaks, resident  # isort: skip
from warm import warm_up  # isort: skip


def level() -> dict[str, int]:
    return {"bytes": sum(resident().values())}


def main() -> None:
    import torch

    from moeq.models.experts import find_expert_layers
    from moeq.models.loading import skeleton
    from moeq.models.source import open_source
    from moeq.runtime.checkpoint import load_checkpoint

    path = Path(sys.argv[1])
    warm_up()
    find_expert_layers(skeleton(open_source(str(path)), torch.bfloat16, packed=True))
    gc.collect()
    before = level()["bytes"]
    with Peaks(level) as peaks:
        model: Any = load_checkpoint(path, torch.bfloat16, torch.device("cpu"))
    gc.collect()
    loaded = level()["bytes"]
    for tensor in [*model.parameters(), *model.buffers()]:  # the others may only be mapped
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[::4096].sum()
    print(json.dumps({"before": before, "highest": peaks.highest["bytes"], "loaded": loaded, "read": level()["bytes"]}))


if __name__ == "__main__":
    main()
