"""lm-eval's own command line with moeq's models: `python -m moeq.lm_eval --model moeq --model_args pretrained=RUN,...`.

pretrained: a run, RUN:ASSIGNMENT, or a checkpoint that moeq exported. With gpu_experts, code_bits, alpha, selector,
loss_weighting, prefill, first_token or statistics its experts follow the context; with memory, high, low, host, period,
ema, threshold, certainty, transient, tokens or copies they follow the workload; else they are as assigned.
"""

from __future__ import annotations

import sys
from typing import Any

from moeq.comparison.eval_options import count
from moeq.errors import EvaluationError, MoeqError, RecipeError

NAME = "moeq"
SETTINGS = ("batch_size", "device", "dtype", "max_length", "truncate", "trust_remote_code")
PASSED = ("max_batch_size",)  # what lm-eval passes to every model


def make_model(pretrained: str | None = None, **given: Any) -> Any:
    """The lm-eval model of `--model moeq`; RecipeError for an unknown option, and what opening it raises."""
    import torch

    from moeq.comparison import loaded
    from moeq.comparison.subjects import Subject, open_subjects
    from moeq.evaluation.context_options import ContextOptions
    from moeq.runtime.dynamic.options import DynamicOptions

    if pretrained is None:
        raise RecipeError("no pretrained=RUN_OR_CHECKPOINT", where="--model_args", do="name a run or a checkpoint")
    if str(given.get("device")).startswith("cuda") and not torch.cuda.is_available():
        del given["device"]  # lm-eval's own default, which its models leave alone where there is no GPU
    own = {name: given[name] for name in SETTINGS if given.get(name) is not None}
    asked = {name: value for name, value in given.items() if name not in (*SETTINGS, *PASSED)}
    of_workload = set(asked) & set(DynamicOptions.model_fields)
    kind: type[ContextOptions | DynamicOptions] = DynamicOptions if of_workload else ContextOptions
    contexts = [kind.of(asked, "--model_args")] if asked else []
    settings = loaded.Settings(**_checked(own))
    opened = open_subjects([pretrained], contexts, settings.trust_remote_code)
    subject = opened[-1]
    if len(opened) != 1 + len(contexts) or not isinstance(subject, Subject):
        do = "give a run, one of its assignments or a checkpoint"
        raise EvaluationError("is no single model", where=pretrained, do=do)
    loaded.check(subject)
    return loaded.lm_of(loaded.load(subject, settings), subject, settings)


def _checked(own: dict[str, Any]) -> dict[str, Any]:
    """Settings with a batch size; RecipeError for a value that cannot be."""
    from moeq.models.loading import DTYPES

    checked = own | {"batch_size": count("--batch_size", own.get("batch_size", 1), "auto")}
    if "max_length" in own:
        checked["max_length"] = count("max_length", own["max_length"])
    choices = {"dtype": ("auto", *DTYPES), "truncate": (True, False), "trust_remote_code": (True, False)}
    for name, allowed in choices.items():
        if own.get(name, allowed[0]) not in allowed:
            raise RecipeError(f"{name}={own[name]}", where="--model_args", do=f"give {', '.join(map(str, allowed))}")
    return checked


def register() -> None:
    """Let lm-eval find `moeq` among its models."""
    from lm_eval.api.registry import register_model
    from lm_eval.utils import simple_parse_args_string

    from moeq.evaluation.harness_models import StaticLM

    class Moeq(StaticLM):
        """Stands in lm-eval's registry; what it makes is a model of `evaluation.harness_models`."""

        @classmethod
        def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> Any:
            return make_model(**arg_dict, **(additional_config or {}))

        @classmethod
        def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> Any:
            return make_model(**simple_parse_args_string(arg_string), **(additional_config or {}))

    register_model(NAME)(Moeq)


def main() -> None:
    """Entry point: lm-eval's, and moeq's errors as one line."""
    from lm_eval.__main__ import cli_evaluate

    register()
    try:
        cli_evaluate()
    except MoeqError as error:
        print(f"moeq: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
