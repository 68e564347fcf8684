"""MoNDE, the GPU + NDP baseline of paper 000: FP16 experts on the NDP, some fetched to the GPU at every step.

Variants: `bwrule` fetches the share that the link has of both bandwidths, at least one expert; `hotset` the globally
most popular ones, as many as the placement has hot; `opt` as many (none included) as make the layer shortest.
"""

from __future__ import annotations

import numpy as np

from moeq.estimator.offload import PREFILL_SPLIT, bandwidth_rule, cost_optimal, prefill_split, split_schedule
from moeq.estimator.policies import Policy, Variant, parameter
from moeq.estimator.step import BoolArray, Layers, Schedule, Work


class Monde(Policy):
    """Layer: t_dense + E[max(H*t_fetch + t_gpu(last), sum_cold t_ndp(16) + t_act)]; nothing migrates.

    Where the memory only holds experts all variants fetch every active one, as compute follows.
    """

    def decode(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """Fetches by the variant's rule."""
        if not layers.hardware.ndp.computes:
            return split_schedule(layers, work, work.tokens > 0)
        rules = {"bwrule": bandwidth_rule, "hotset": _hot_set, "opt": cost_optimal}
        return split_schedule(layers, work, rules[variant](layers, work))

    def prefill(self, layers: Layers, work: Work, variant: str) -> Schedule:
        """One rule for all variants, the parameter prefill_split."""
        return prefill_split(layers, work, parameter(self, layers.hardware, "prefill_split"))


def _hot_set(layers: Layers, work: Work) -> BoolArray:
    hot = layers.popularity_rank < layers.hot.sum(axis=1, keepdims=True)
    return np.asarray(work.pick(hot), dtype=np.bool_)


POLICY = Monde(
    name="monde",
    help="FP16 experts near their memory, some fetched to the GPU at every step",
    variants={
        "bwrule": Variant("MoNDE (bandwidth rule)", "MoNDE, bandwidth rule", monotone=False, follows="nothing"),
        "hotset": Variant("MoNDE (hot set)", "MoNDE, hot set fetched", follows="number"),
        "opt": Variant("MoNDE (cost-optimal)", "MoNDE, cost-optimal", follows="nothing"),
    },
    parameters={"prefill_split": PREFILL_SPLIT},
    near_data=True,
)
