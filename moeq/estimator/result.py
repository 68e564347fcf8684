"""The result of an estimate: frozen models that become JSON as they are (schema_version 1)."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from moeq.errors import EstimateError, nearest
from moeq.estimator.devices import Constant


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PolicyPoint(_Frozen):
    """One policy at one grid point.

    `decode_seconds_per_token` is a step of the whole model, a token for every sequence of the batch. A request takes
    prefill, migration and output_tokens steps; its first token is there after the first of them.
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
    time_to_first_token_seconds: float
    ndp_seconds_per_layer: float


class Speedup(_Frozen):
    """How much faster the context-aware placement is than a baseline at one grid point."""

    baseline: str
    batch: int
    input_tokens: int
    output_tokens: int
    decode: float
    end_to_end: float


class TermRow(_Frozen):
    """One term of a policy's decode step over all layers; overlapping terms' shares add up to more than 1.

    `seconds` are expected busy seconds, `bound_by` (bytes, macs, latency, none) what most of them are made of.
    """

    policy: str
    batch: int
    term: str
    seconds: float
    share: float
    bytes: float
    macs: float
    bound_by: str


class SensitivityRow(_Frozen):
    """Decode speed-ups over both MoNDE baselines with one assumption changed."""

    assumption: str
    change: str
    decode_speedup_over_monde_bwrule: float
    decode_speedup_over_monde_opt: float


class Capacity(_Frozen):
    """Bytes that the placement needs beside what the devices hold.

    GPU: its experts, the rest of the model in FP16, and keys and values of the largest batch at the context. NDP: FP16
    and every replica of all experts, so that the next sequence can be placed differently.
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


class Estimate(_Frozen):
    """Everything that was estimated for a model, a placement and a hardware, with what it hangs on."""

    schema_version: Literal[1] = 1
    geometry: str
    hardware: str
    placement: str
    num_layers: int
    assigned_layers: int
    group_size: int | None
    zero_points: bool
    context: int
    monte_carlo_samples: int
    seed: int
    routing: dict[int, Literal["exact", "monte-carlo"]]
    ndp_speedup_over_fp16: float
    points: tuple[PolicyPoint, ...]
    speedups: tuple[Speedup, ...]
    terms: tuple[TermRow, ...]
    capacity: Capacity
    assumptions: tuple[str, ...]
    sensitivity: tuple[SensitivityRow, ...]
    hardware_constants: tuple[Constant, ...]

    @property
    def policies(self) -> list[str]:
        """Names of the policies and their variants, in the order of the points."""
        return list(dict.fromkeys(point.policy for point in self.points))

    def point(self, policy: str, *, batch: int, input_tokens: int, output_tokens: int) -> PolicyPoint:
        """The point of a policy; raises EstimateError for a policy or grid point that was not estimated."""
        self._known(policy, self.policies)
        for one in self.points:
            if (one.policy, one.batch, one.input_tokens, one.output_tokens) == (
                policy,
                batch,
                input_tokens,
                output_tokens,
            ):
                return one
        raise self._off_grid(batch)

    def speedups_over(self, baseline: str, *, batch: int) -> list[Speedup]:
        """Speed-ups over a baseline at all grid points of a batch; raises EstimateError as `point` does."""
        self._known(baseline, [one.baseline for one in self.speedups])
        rows = [one for one in self.speedups if one.baseline == baseline and one.batch == batch]
        if not rows:
            raise self._off_grid(batch)
        return rows

    def step_terms(self, policy: str, *, batch: int) -> dict[str, TermRow]:
        """The decode terms of a policy by name; raises EstimateError as `point` does."""
        self._known(policy, self.policies)
        rows = {one.term: one for one in self.terms if one.policy == policy and one.batch == batch}
        if not rows:
            raise self._off_grid(batch)
        return rows

    def _off_grid(self, batch: int) -> EstimateError:
        return EstimateError(f"no estimate at this point (batch {batch})", do="add it to the grid")

    @staticmethod
    def _known(policy: str, known: list[str]) -> None:
        if policy not in known:
            close = nearest(policy, known)
            hint = f"did you mean {close!r}?" if close else f"known: {', '.join(dict.fromkeys(known))}"
            raise EstimateError(f"unknown policy {policy!r}", do=hint)
