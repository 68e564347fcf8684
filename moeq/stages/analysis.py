"""`moeq report --analysis`: routing analyses of the recorded trace, and the curves that eval measured, as files.

Only the profile with its trace is needed; the curves are written where the evaluation has them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moeq.analysis.routing import RoutingAnalysis, analyse, mean
from moeq.artifacts import low_precision
from moeq.artifacts.files import make_directory, write_json, write_text
from moeq.artifacts.low_precision import LowPrecisionReport, read_sweeps
from moeq.artifacts.trace import NAME as TRACE
from moeq.artifacts.trace import read_trace
from moeq.errors import ArtifactError
from moeq.reporting import svg
from moeq.reporting.atlas import ExpertMap
from moeq.reporting.low_precision import share_chart
from moeq.reporting.routing import routing_maps, similarity_lines
from moeq.stages import profile
from moeq.stages.context import Context

ROUTING = "routing.json"


def recorded(context: Context) -> RoutingAnalysis:
    """What the run's trace says; ArtifactError saying how to record one where there is none, or it is another's."""
    directory = context.directory("profile")
    path = directory / TRACE
    if not path.is_file():
        raise ArtifactError(
            "no routing trace of this run",
            where=str(path),
            do="record one with `moeq profile RUN --set profile.trace=true`",
        )
    trace = read_trace(path)
    if trace.text != profile.load(context).text:
        raise ArtifactError("of other text than the profile", where=str(path), do="run `moeq profile` again")
    return analyse(trace)


def measured(context: Context) -> LowPrecisionReport | None:
    """The curves of the evaluation; None where the recipe asks for none."""
    if not context.recipe.eval.low_precision:
        return None
    return read_sweeps(context.directory("eval") / low_precision.NAME)


def written(maps: Iterable[ExpertMap]) -> dict[str, str]:
    """{file: text} of maps, each as a drawing and as a table."""
    return {f"{each.key}.{ending}": text for each in maps for ending, text in
            (("svg", each.svg()), ("csv", each.csv()))}  # fmt: skip


def write(context: Context, directory: Path) -> dict[str, Any]:
    """Write routing.json, the maps (SVG, CSV) and the charts (SVG) into a folder; returns the figures and the files.

    Raises ArtifactError where the run has no trace.
    """
    routing = recorded(context)
    path = context.directory("eval") / low_precision.NAME
    curves = read_sweeps(path) if path.is_file() else None
    texts = written(routing_maps(routing))
    if mean(routing.similarity.same) is not None:
        texts["phase-similarity.svg"] = svg.printed(similarity_lines(routing.similarity, routing.layers))
    make_directory(directory)
    documents: dict[str, Any] = {ROUTING: routing.as_json()}
    if curves is not None:
        documents[low_precision.NAME] = curves.model_dump(mode="json")
        texts |= {
            f"low-precision-{sweep.low_bits}-of-{sweep.high_bits}-{number}.svg": svg.printed(share_chart(sweep, number))
            for number, sweep in enumerate(curves.sweeps)
        }
    for name, document in documents.items():
        write_json(directory / name, document)
    for name, text in texts.items():
        write_text(directory / name, text)
    return {
        "prefill_decode_cosine": {
            name: {"own_decode": mean(similarity.same), "decode_of_another": mean(similarity.other)}
            for name, similarity in [("all", routing.similarity), *routing.by_domain.items()]
        },
        "files": [str(directory / name) for name in (*documents, *texts)],
    }
