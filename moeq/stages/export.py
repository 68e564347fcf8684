"""export: the packed checkpoint directory, its placement manifest and its model card."""

from __future__ import annotations

from typing import Any

from moeq.artifacts.files import write_text
from moeq.artifacts.manifest import PlacementManifest
from moeq.artifacts.stage import read_record
from moeq.exporters import export
from moeq.exporters.moeq import ExportInputs
from moeq.models.loading import expert_keys
from moeq.runtime.checkpoint import CARD
from moeq.stages import assign, model_card, others, profile, quantize
from moeq.stages.context import Context


def run(context: Context) -> dict[str, Any]:
    """Write the checkpoint directory; returns the summary."""
    skeleton, layers = context.described
    assignment = assign.load(context)
    directory = context.directory("quantize")
    inputs = ExportInputs(
        source=context.source,
        layers=layers,
        top_k=profile.load(context).top_k,
        assignment=assignment,
        expert_keys=expert_keys(context.source, skeleton, layers),
        expert_files=quantize.files(directory),
        quantizers=quantize.quantizers(directory),
        max_shard_bytes=context.recipe.export.max_shard,
        stamp=context.stamp,
        others=others.table(context),
        other_keys=frozenset(others.replaced_keys(context)),
        digests={stage: read_record(context.directory(stage), stage).digest for stage in ("assign", "quantize")},
    )
    target = context.directory("export")
    with context.reporter.bar("export", 1) as advance:
        manifest = export(context.recipe.export.format, inputs, target)
        advance()
    write_card(context, manifest)
    return manifest.totals.model_dump() | {"original_expert_bytes": original_bytes(context, inputs.expert_keys)}


def original_bytes(context: Context, keys: set[str]) -> int:
    """Bytes of the routed experts in the original checkpoint."""
    return sum(context.source.tensors[key].bytes for key in keys)


def write_card(context: Context, manifest: PlacementManifest, figures: list[dict[str, Any]] | None = None) -> None:
    """Write the model card; the report stage writes it again with the measured figures."""
    write_text(context.directory("export") / CARD, model_card.render(manifest, context.source.config, figures or []))
