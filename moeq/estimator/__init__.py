"""Performance of a placed Mixture-of-Experts model on a GPU with near-data-processing memory, beside its baselines."""

from moeq.estimator.devices import Hardware
from moeq.estimator.estimate import chosen_labels, estimate
from moeq.estimator.geometry import (
    CONFIG_KEYS,
    ModelGeometry,
    equal_bits,
    geometry_from_config,
    known_geometries,
    load_geometry,
)
from moeq.estimator.hardware import known_hardware, load_hardware, own_hardware
from moeq.estimator.placement import Placement, uniform_placement
from moeq.estimator.result import Estimate
from moeq.estimator.timeline import Interval, timeline
from moeq.estimator.workload import Grid, placed_popularity, zipf_popularity

__all__ = [
    "CONFIG_KEYS", "Estimate", "Grid", "Hardware", "Interval", "ModelGeometry", "Placement", "chosen_labels",
    "equal_bits", "estimate", "geometry_from_config", "known_geometries", "known_hardware",
    "load_geometry", "load_hardware", "own_hardware", "placed_popularity", "timeline", "uniform_placement",
    "zipf_popularity",
]  # fmt: skip
