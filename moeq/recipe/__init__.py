"""Recipes: YAML validated by pydantic, a file for every section; what other packages use of them stands here."""

from moeq.recipe.assign import (
    BUDGETS,
    DEFAULT_QUANTIZER,
    SHARED,
    AssignSection,
    MethodSettings,
    NamedAssignSection,
    budget_keys,
)
from moeq.recipe.building import Start
from moeq.recipe.choices import BEST, Bits, BitsOrFull, Denominator, Dropping, Ends, Softmax
from moeq.recipe.corpus import CorpusSection
from moeq.recipe.dynamic import DynamicSection
from moeq.recipe.estimate import LARGEST_BATCH, LARGEST_LENGTH, MOST_POINTS, CaseSection, StatedSection
from moeq.recipe.eval import LowPrecisionSection, PerplexitySection, TestImagesSection, TranslationSection
from moeq.recipe.losses import ExpertEffectsSection, LayerEffectsSection, LossesSection
from moeq.recipe.quantize import RefineSection, TuneSection
from moeq.recipe.reading import load_recipe
from moeq.recipe.recipe import Recipe
from moeq.recipe.reparam import IntegerSection, ReparamSection, W8A8Section
from moeq.recipe.sources import (
    BUNDLED,
    DIGITS,
    HUB,
    HUB_DATASET,
    SourceSection,
    TextSource,
    domain_names,
    each_source,
    is_weighted,
    naming_part,
    source_name,
    source_text,
    template_parts,
)
from moeq.recipe.types import Bytes, Rational

__all__ = [
    "BEST", "BUDGETS", "BUNDLED", "DEFAULT_QUANTIZER", "DIGITS", "HUB", "HUB_DATASET", "LARGEST_BATCH",
    "LARGEST_LENGTH", "MOST_POINTS", "SHARED", "AssignSection", "Bits", "BitsOrFull", "Bytes", "CaseSection",
    "CorpusSection", "Denominator", "Dropping", "DynamicSection", "Ends", "ExpertEffectsSection", "IntegerSection",
    "LayerEffectsSection", "LossesSection", "LowPrecisionSection", "MethodSettings", "NamedAssignSection",
    "PerplexitySection", "Rational", "Recipe", "RefineSection", "ReparamSection", "Softmax", "SourceSection", "Start",
    "StatedSection", "TestImagesSection", "TextSource", "TranslationSection", "TuneSection", "W8A8Section",
    "budget_keys", "domain_names", "each_source", "is_weighted", "load_recipe", "naming_part", "source_name",
    "source_text", "template_parts",
]  # fmt: skip
