"""The LM evaluation harness on a trained run: our model under its registry, its own command line, its own words.

What can be checked without the harness stands here; `fednl.harness_model` is the model, and imports it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fednl.errors import SettingsError

MODEL = "fednl"
"""The name under which the harness finds our model."""
_NO_MODEL = ("ls", "validate")


def lm_eval(arguments: Sequence[str]) -> None:
    """Hands arguments to the harness's own command line, with our model registered as `fednl`.

    Args:
        arguments: what would follow `lm-eval`. Where tasks are run and no model is named, `--model fednl` is added.

    Raises:
        SettingsError: the package `lm-eval` is not installed.
        SystemExit: the harness leaves, as for `--help` or an argument it does not know.
        FednlError: the run that the model arguments name cannot be loaded.

    Example:
        `lm_eval(["--model_args", "run=runs/demo", "--tasks", "lambada_openai"])`
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise SettingsError('lm-eval needs the package of that name, which is not here: pip install "fednl[lm-eval]".')
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    from fednl.harness_model import FednlLM

    register_model(MODEL)(FednlLM)
    with _command_line(with_model(arguments)):
        cli_evaluate()


def with_model(arguments: Sequence[str]) -> list[str]:
    """Gives the arguments with our model named, where tasks are run and nothing names another.

    Args:
        arguments: what would follow `lm-eval`; not modified.
    """
    named = {argument.partition("=")[0] for argument in arguments}
    runs = named & {"--tasks", "-t"} and arguments[0] not in _NO_MODEL
    if runs and not named & {"--model", "-M", "--config", "-C"}:
        return [*arguments, "--model", MODEL]
    return list(arguments)


@contextmanager
def _command_line(arguments: Sequence[str]) -> Iterator[None]:
    """The harness reads the process's own arguments, in every release."""
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        yield
    finally:
        sys.argv = before
