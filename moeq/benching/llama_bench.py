"""llama.cpp's own bench on a GGUF file, for the same lengths and threads."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

PROGRAM = "llama-bench"
LONGEST_SECONDS = 1800


def llama_bench(gguf: Path | None, *, prompt_tokens: int, new_tokens: int, repeat: int, threads: int) -> dict[str, Any]:
    """Tokens a second of prompt and of generation at batch 1; or `refusal`, why there are none."""
    if gguf is None:
        return {"refusal": "no --gguf FILE was given"}
    program = shutil.which(PROGRAM)
    if program is None:
        return {"refusal": f"not installed: {PROGRAM} is not on PATH"}
    lengths = ["-p", str(prompt_tokens), "-n", str(new_tokens), "-r", str(repeat), "-t", str(threads)]
    command = [program, "-m", str(gguf), *lengths, "-o", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"refusal": f"failed ({error})"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"refusal": f"failed with {done.returncode} ({last})"}
    try:
        return _read(json.loads(done.stdout))
    except (ValueError, LookupError, TypeError) as error:
        return {"refusal": f"its JSON has another shape ({error!r})"}


def _read(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of its rows, one for the prompt alone and one for new tokens alone."""
    prompt = next((row["avg_ts"] for row in rows if not row["n_gen"]), None)
    decode = next((row["avg_ts"] for row in rows if not row["n_prompt"]), None)
    found = {"prefill_tokens_per_second": prompt, "decode_tokens_per_second": decode}
    return {**found, "model": rows[0]["model_type"], "build": str(rows[0].get("build_commit", "")), "refusal": None}
