"""The result of an estimate: frozen models that become JSON as they are (schema_version 2)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from moeq.errors import EstimateError
from moeq.estimator.devices import Constant
from moeq.registry import POLICIES


class Frozen(BaseModel):
    """A part of a result: it does not change, and files that hold more are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PolicyPoint(Frozen):
    """One policy at one grid point.

    `decode_seconds_per_token` is a step of the whole model, a token for every sequence of the batch; of it, copies
    that compute does not hide are `stall_seconds_per_token`. A request takes prefill, migration and output_tokens
    steps; its first token is there after the first of them. `ndp_busy_share` is the time that the NDP computes,
    `bytes_moved` what crosses each memory and the link, `energy_joules` what bytes, MACs and static power take, in all
    and by device (None: the hardware file gives no energies), all of them of such a request of the whole batch.
    `gpu_expert_share`: of the tokens that reach experts in decode, those that the GPU computes. `..._error_seconds`:
    standard errors of Monte Carlo sampling, 0 where routing was enumerated, recorded or expected.
    """

    policy: str
    batch: int
    input_tokens: int
    output_tokens: int
    prefill_seconds: float
    migration_seconds: float
    decode_seconds_per_token: float
    end_to_end_seconds: float
    decode_tokens_per_second: float
    prefill_tokens_per_second: float
    time_to_first_token_seconds: float
    stall_seconds_per_token: float
    ndp_seconds_per_layer: float
    ndp_busy_share: float
    gpu_expert_share: float
    bytes_moved: dict[Literal["gpu_memory", "link", "ndp_memory", "disk"], float]
    energy_joules: float | None
    energy_by_device: dict[Literal["gpu", "link", "ndp"], float] | None = None
    prefill_error_seconds: float = 0.0
    decode_error_seconds: float = 0.0
    end_to_end_error_seconds: float = 0.0

    @property
    def at(self) -> tuple[int, int, int]:
        """Batch, input and output tokens."""
        return self.batch, self.input_tokens, self.output_tokens


class Speedup(Frozen):
    """How much faster the context-aware placement is than a baseline at one grid point.

    Standard errors as if both times were sampled apart, which they are not: at most these where samples are shared.
    """

    baseline: str
    batch: int
    input_tokens: int
    output_tokens: int
    decode: float
    end_to_end: float
    decode_error: float = 0.0
    end_to_end_error: float = 0.0


class TermRow(Frozen):
    """One term of a policy's decode step, prefill or migration over all layers.

    Shares of terms that overlap add up to more than 1. `seconds` are expected busy seconds, `bound_by` (bytes, macs,
    latency, none) what most of them are made of.
    """

    policy: str
    batch: int
    term: str
    seconds: float
    share: float
    bytes: float
    macs: float
    bound_by: str
    phase: Literal["prefill", "migration", "decode"] = "decode"
    input_tokens: int | None = None


class SensitivityRow(Frozen):
    """What becomes of the answer with one assumption changed (none: as all are), at the grid's first point.

    `decode_seconds_per_token` is that of the context-aware placement; the speed-ups are its own, over the policies
    that were worked out for this row.
    """

    assumption: str
    change: str
    decode_seconds_per_token: float
    decode_speedup_over_monde_bwrule: float
    decode_speedup_over_monde_opt: float
    decode_speedups: dict[str, float]
    end_to_end_speedups: dict[str, float]


class Refusal(Frozen):
    """A policy that cannot run the model at a batch, and the sum that does not fit."""

    policy: str
    batch: int
    reason: str


class Unfit(Frozen):
    """A grid point whose keys and values do not fit beside the placement, and the sum."""

    batch: int
    input_tokens: int
    output_tokens: int
    reason: str


class Capacity(Frozen):
    """Bytes that the placement needs beside what the devices hold.

    GPU: its experts, the rest of the model in FP16, and the keys and values of the point that has most of them. NDP:
    FP16 and every replica of all experts, so that the next sequence can be placed differently.
    """

    gpu_expert_bytes: float
    ndp_expert_bytes: float
    replica_bytes: float
    replica_bits: tuple[int, ...]
    gpu_non_expert_bytes: float
    gpu_kv_cache_bytes: float
    gpu_capacity_bytes: float
    ndp_capacity_bytes: float
    fits_gpu: bool
    fits_ndp: bool


class Estimate(Frozen):
    """Everything that was estimated for a model, a placement and a hardware, with what it hangs on.

    `unfit`: points of the grid that do not fit; `points` has none of them unless nothing fits at all.
    """

    schema_version: Literal[2] = 2
    geometry: str
    hardware: str
    placement: str
    num_layers: int
    assigned_layers: int
    group_size: int | None
    zero_points: bool
    context: int
    kv_growth: bool
    monte_carlo_samples: int
    seed: int
    routing: dict[int, Literal["exact", "monte-carlo", "trace"]]
    ndp_speedup_over_fp16: float
    points: tuple[PolicyPoint, ...]
    speedups: tuple[Speedup, ...]
    terms: tuple[TermRow, ...]
    earlier_terms: tuple[TermRow, ...]
    refused: tuple[Refusal, ...]
    unfit: tuple[Unfit, ...] = ()
    capacity: Capacity
    assumptions: tuple[str, ...]
    sensitivity: tuple[SensitivityRow, ...]
    hardware_constants: tuple[Constant, ...]

    @property
    def policies(self) -> list[str]:
        """Names of the policies and their variants, in the order of the points."""
        return list(dict.fromkeys(point.policy for point in self.points))

    @property
    def sampling_error(self) -> float:
        """The largest standard error of a decode step or a whole request by sampling, as a share of it."""
        steps = (point.decode_error_seconds / point.decode_seconds_per_token for point in self.points)
        whole = (point.end_to_end_error_seconds / point.end_to_end_seconds for point in self.points)
        return max([*steps, *whole])

    @property
    def unfit_lines(self) -> list[str]:
        """A sentence for each batch some points of which do not fit and are left out."""
        lines, there = [], {point.at for point in self.points}
        left_out = [row for row in self.unfit if (row.batch, row.input_tokens, row.output_tokens) not in there]
        for batch in dict.fromkeys(row.batch for row in left_out):
            rows = [row for row in left_out if row.batch == batch]
            least = min(rows, key=lambda row: row.input_tokens + row.output_tokens)
            many = "1 point does" if len(rows) == 1 else f"{len(rows)} points do"
            at = f"{least.input_tokens} + {least.output_tokens} tokens"
            lines.append(f"batch {batch}: {many} not fit; with {at} it {least.reason}")
        return lines

    def point(self, policy: str, *, batch: int, input_tokens: int, output_tokens: int) -> PolicyPoint:
        """The point of a policy; raises EstimateError for a policy or grid point that was not estimated."""
        self._check(policy, self.policies)
        for point in self.points:
            if point.policy == policy and point.at == (batch, input_tokens, output_tokens):
                return point
        raise self._off_grid(batch, policy)

    def speedups_over(self, baseline: str, *, batch: int) -> list[Speedup]:
        """Speed-ups over a baseline at all grid points of a batch; raises EstimateError as `point` does."""
        self._check(baseline, [row.baseline for row in self.speedups])
        rows = [row for row in self.speedups if row.baseline == baseline and row.batch == batch]
        if not rows:
            raise self._off_grid(batch, baseline)
        return rows

    def step_terms(self, policy: str, *, batch: int) -> dict[str, TermRow]:
        """The decode terms of a policy by name; raises EstimateError as `point` does."""
        self._check(policy, self.policies)
        rows = {row.term: row for row in self.terms if row.policy == policy and row.batch == batch}
        if not rows:
            raise self._off_grid(batch, policy)
        return rows

    def _check(self, policy: str, estimated: list[str]) -> None:
        known = [*estimated, *(refusal.policy for refusal in self.refused)]
        if policy not in known:
            raise POLICIES.refused(policy, dict.fromkeys(known), EstimateError)

    def _off_grid(self, batch: int, policy: str) -> EstimateError:
        for refusal in self.refused:
            if (refusal.policy, refusal.batch) == (policy, batch):
                where = f"{policy} at batch {batch}"
                return EstimateError(refusal.reason, where=where, do="give other hardware or bits")
        return EstimateError(f"no estimate at this point (batch {batch})", do="add it to the grid")
