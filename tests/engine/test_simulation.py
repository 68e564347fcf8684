"""The simulated run: what is known without simulating, the bounds of any schedule, and which resource binds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeq.engine.simulation import Cluster, LayerWork, simulate

SECONDS = st.floats(0.01, 5)
LAYERS = st.lists(
    st.builds(
        LayerWork,
        forward_seconds=SECONDS,
        tasks=st.lists(SECONDS, min_size=1, max_size=6),
        made_bytes=st.floats(0, 5),
    ),
    min_size=1,
    max_size=5,
)


def test_layers_that_are_ahead_hide_the_forward() -> None:
    layers = [LayerWork(forward_seconds=1, tasks=[2.0, 2.0])] * 3
    assert simulate(layers, Cluster(workers=2)).seconds == pytest.approx(1 + 3 * 2)
    assert simulate(layers, Cluster(workers=2, ahead=0)).seconds == pytest.approx(3 * 3)
    assert simulate(layers, Cluster(workers=1)).seconds == pytest.approx(1 + 3 * 4)
    assert simulate(layers, Cluster(workers=2)).binds == "workers"


def test_threads_share_cores() -> None:
    layers = [LayerWork(forward_seconds=0.01, tasks=[1.0] * 8)]
    assert simulate(layers, Cluster(workers=4, cores=2)).seconds == pytest.approx(4.01)
    assert simulate(layers, Cluster(workers=4)).seconds == pytest.approx(2.01)
    two = [LayerWork(forward_seconds=1, tasks=[1.0])] * 2  # the second forward beside the first task, on one core
    assert simulate(two, Cluster(workers=1, cores=1)).seconds == pytest.approx(4)


def test_what_is_handed_out_takes_time() -> None:
    layer = LayerWork(forward_seconds=0.1, tasks=[1.0] * 4, common_bytes=10, own_bytes=20, made_bytes=30)
    rates = {"copied_bytes_per_second": 10, "link_bytes_per_second": 5, "stored_bytes_per_second": 15}
    found = simulate([layer], Cluster(workers=4, nodes=2, start_seconds=0.4, task_seconds=0.5, **rates))
    assert found.seconds == pytest.approx(0.4 + 0.1 + 3 + (10 + 10) / 5 + 1.5 + 2)
    assert found.binds == "link"


@given(LAYERS, st.integers(1, 5), st.integers(0, 2))
def test_no_schedule_is_better_than_its_bounds(layers: list[LayerWork], workers: int, ahead: int) -> None:
    cluster = Cluster(workers=workers, ahead=ahead, stored_bytes_per_second=10)
    found = simulate(layers, cluster)
    work = sum(sum(layer.tasks) for layer in layers)
    forward = sum(layer.forward_seconds for layer in layers)
    assert found.seconds >= max(work / workers, forward) - 1e-9
    made = sum(layer.made_bytes for layer in layers) / cluster.stored_bytes_per_second
    assert found.seconds <= made + forward + work + 1e-9
    assert found.busy["workers"] * found.seconds * workers == pytest.approx(work)
    assert found.busy["driver"] <= 1 + 1e-9
