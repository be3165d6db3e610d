"""From a run to a model that remembers, with the shared rules or with those of one client."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from fednl.arms import make_algorithm, ranks_of
from fednl.config import Config
from fednl.errors import CheckpointError, SettingsError
from fednl.federation.checkpoint import load_round, read_tensors
from fednl.federation.groups import group_of
from fednl.federation.lora_ranks import padded, rules_by_client
from fednl.memory.rules_file import TENSORS
from fednl.models import loading
from fednl.models.settings import BackboneSettings
from fednl.origin import FILE
from fednl.runs import Run

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from fednl.federation.params import Params


def load(
    path: str | Path, *, backbone: BackboneSettings | None = None, client: str = ""
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Loads the backbone and puts trained rules onto it, ready for `model.generate()`.

    A run's rules are the shared ones. What single clients keep to themselves (rules that do not travel, FedALA's
    mixtures) is in the checkpoints and not in `final/`, where those of the start stand: with `client` it is loaded, and
    without a warning names it. Of a LoRA a client has as many components as it trains (`federation.lora-ranks`); the
    others are zero. FedWeIT's parts of each task are left out, as they depend on the question.

    Args:
        path: a run's folder (its `final/` rules are taken), or a folder of rules such as a run's `best/` or
            what `fednl.save_rules` wrote.
        backbone: which backbone, where and in which precision; None is the run's own, or the one that the
            rules name.
        client: whose rules, of those who took part in the run; empty for the shared ones.

    Returns:
        The model, in evaluation mode with its adapters attached, and the tokenizer.

    Raises:
        SettingsError: the folder is neither a run nor rules, the run has no rules yet or none that a round has changed,
            the backbone is not there, the client is none of the run's, or the run shared nothing and nobody is named.
        BackboneError: the rules belong to another backbone.
        CheckpointError: the rules are damaged or do not fit, or the checkpoint with the client's own is not there.

    Example:
        `model, tokenizer = fednl.load("runs/demo")`
    """
    run, folder = loading.place_of(path)
    if run is None and client:
        raise SettingsError(f'client = "{client}", but {path} is no run: name the run\'s folder, or leave client out.')
    if run is not None:
        _check_trained(run, folder)
    own = _own(run, folder, client) if run is not None and client else {}
    if run is not None and not client:
        _tell(run, folder)
    return loading.load(path, backbone=backbone, instead=own)


def _check_trained(run: Run, folder: Path) -> None:
    """Refuses rules that no round has changed, which an interrupted run or one whose rounds failed leaves behind."""
    try:
        header = read_tensors(folder / TENSORS)[1]
    except CheckpointError:
        return  # loading says what is wrong
    if header.get("updates") == 0:
        raise SettingsError(
            f"no round has changed the rules of {run.path}, so that {folder.name}/ holds those that training began "
            f"with: go on with `fednl train --resume {run.path}`; its rounds.jsonl says why rounds failed."
        )


def _own(run: Run, folder: Path, client: str) -> Params:
    """A client's rules after the round that the folder's are of."""
    rows = run.read_json(FILE).get("rows", [])
    trained = dict.fromkeys(row["client"] for row in rows if row["split"] == "train" and row["n"])
    if client not in trained:
        raise SettingsError(f'client = "{client}" did not train in {run.path}; choose from {", ".join(trained)}.')
    config = _config(run)
    algorithm, ranks = make_algorithm(config, "federated"), ranks_of(config, "federated")
    params, header = read_tensors(folder / TENSORS)
    states = load_round(run.path / "checkpoints", int(header.get("round", 0))).client_states
    own = rules_by_client(algorithm, params, states, [client], ranks)[client]
    return padded({name: tensor for name, tensor in own.items() if name in params}, params)


def _tell(run: Run, folder: Path) -> None:
    """Warns of rules that stand as they began, since each client has its own; refuses where all do."""
    try:
        algorithm, params = make_algorithm(_config(run), "federated"), read_tensors(folder / TENSORS)[0]
    except (SettingsError, CheckpointError):
        return  # loading says what is wrong
    together = {*algorithm.shared(params), *algorithm.given(params)}
    private = [name for name in algorithm.trainable(params) if name not in together]
    if private and not together:
        raise SettingsError(
            f"{run.path} shared nothing, so that {folder.name}/ holds the rules that training began with: name whose "
            'to load, as in fednl.load(run, client="...").'
        )
    if private:
        groups = ", ".join(dict.fromkeys(group_of(name) or name for name in private))
        warnings.warn(
            f"{len(private)} of {len(params)} tensors (in {groups}) did not travel in {run.path}, and are loaded as "
            'training began: load the rules of one client with client="...".',
            stacklevel=3,
        )


def _config(run: Run) -> Config:
    return Config.from_dict(run.read_json("config.json"), str(run.path / "config.json"))
