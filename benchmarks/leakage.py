"""Does what the clients share tell which sentences they trained on? A membership probe, with and without noise.

    python benchmarks/leakage.py [--clients 5] [--sentences 8] [--rounds 4] [--steps 6]

Each client trains SmolLM2-135M's memory rules, or a LoRA, on sentences with numbers that nobody else has, through the
library's own rounds. An attacker with the rules at the start and at the end scores the clients' sentences and as many
fresh ones by how much their loss fell. Prints Markdown: the area under the ROC curve with its 95% interval (0.5 is
guessing), and the loss on the clients' sentences, so that protection by not having learned is seen as that.

Context vectors, which IFed-ICL's clients send in its first round, are traced instead: the attacker runs sentences
through the public backbone and scores them by their cosine with what was sent. Here epsilon is of one sentence of a
client, not of a whole client, and the last column says what noise leaves of the vectors.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fednl.evaluation.membership import auc, loss_drops, traces
from fednl.federation.accounting import epsilon_of
from fednl.federation.algorithms import FedAvg
from fednl.federation.exchange import CombineSettings, Exchange, PrivacySettings
from fednl.federation.local import LocalPlan
from fednl.federation.loop import run_rounds
from fednl.federation.message import Message
from fednl.federation.params import ClientState, Params, count
from fednl.federation.settings import FederationSettings, TrainingSettings
from fednl.federation.sharing import take_part
from fednl.federation.transport import InProcessTransport
from fednl.memory import MemoryConfig
from fednl.models import ADAPTERS, load_backbone
from fednl.models.context_vectors import attach_context, mean_outputs, read_outputs
from fednl.models.settings import BackboneSettings, ContextVectorSettings, LoraSettings
from fednl.runs import Run
from fednl.seeding import python_rng

SETTINGS = {
    "memory": MemoryConfig(layers="14-23", rank=8, window_tokens=8, sink_tokens=2),
    "lora": LoraSettings(rank=8, targets="q_proj,v_proj"),
}
CONTEXT, KNOWN = "context-vectors", 64
COUNTED = importlib.util.find_spec("dp_accounting") is not None
NOISE = (None, 0.0, 0.01, 0.1, 0.5) if COUNTED else (None, 0.0)
"""What context vectors are sent with: neither clip nor noise, the clip alone, noise in lengths of what that allows."""
UNIFORM = CombineSettings(weights="uniform")
NAMES = ("Ada", "Boris", "Chen", "Dalia", "Emil", "Farah", "Goran", "Hana", "Ivo", "Jana", "Kofi", "Lena")


def sentences(owner: str, number: int) -> list[str]:
    """Planted sentences of one kind; the same owner has the same ones."""
    rng = python_rng(0, "planted", owner)
    made = []
    for _ in range(number):
        made.append(
            f"The passkey of {rng.choice(NAMES)} at gate {rng.randrange(900)} is {rng.randrange(10**6, 10**7)}."
        )
    return made


class Text:
    """A client's problem: the next token of its own sentences."""

    def __init__(self, model: torch.nn.Module, names: Mapping[str, str], rows: Tensor, seed: tuple[str, int]) -> None:
        self._model, self._names, self._rows, self._seed = model, names, rows, seed
        self.num_examples = len(rows)

    def batches(self, purpose: str, steps: int, size: int = 0) -> Iterator[Tensor]:
        rng = python_rng(0, purpose, *self._seed)
        for _ in range(steps):
            yield self._rows[rng.sample(range(len(self._rows)), min(4, len(self._rows)))]

    def loss(self, params: Params, batch: Tensor) -> Tensor:
        return self.losses(params, batch).mean()

    def losses(self, params: Params, batch: Tensor) -> Tensor:
        """Nats per token of each row; -1 is padding."""
        live = {self._names[name]: value for name, value in params.items()}
        given = {"attention_mask": (batch >= 0).long(), "use_cache": False}
        logits = functional_call(self._model, live, (batch.clamp(min=0),), given).logits[:, :-1].float()
        right = batch[:, 1:]
        nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), right, ignore_index=-1, reduction="none")
        return nats.sum(dim=1) / (right >= 0).sum(dim=1)


def encoded(tokenizer: Any, texts: list[str]) -> Tensor:
    """Rows of tokens, padded at the end with -1."""
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def attack(kind: str, privacy: PrivacySettings, args: argparse.Namespace) -> str:
    """Trains one adapter one way, and gives a row of the table."""
    backbone = load_backbone(BackboneSettings())
    model, adapter = backbone.model, ADAPTERS[kind]()
    adapter.attach(model, SETTINGS[kind], 0)
    raw = {id(parameter): name for name, parameter in model.named_parameters()}
    names = {name: raw[id(parameter)] for name, parameter in adapter.parameters().items()}
    start = adapter.get()
    clients = [f"client-{number}" for number in range(args.clients)]
    owned = {client: encoded(backbone.tokenizer, sentences(client, args.sentences)) for client in clients}
    fresh = encoded(backbone.tokenizer, sentences("nobody", args.clients * args.sentences))
    algorithm = FedAvg(shared="all")
    training = TrainingSettings(rounds=args.rounds, local_steps=args.steps, local_lr=args.lr)
    exchange = Exchange(combine=UNIFORM, privacy=privacy)

    def endpoint(client: str, message: Message, state: ClientState, tell: Any) -> tuple[Message, ClientState]:
        problem = Text(model, names, owned[client], (client, message.round))
        return take_part(algorithm, problem, message, state, LocalPlan.of(training, message.round), exchange, tell)

    told: list[Mapping[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        end = run_rounds(
            algorithm,
            InProcessTransport(endpoint, dict.fromkeys(clients, args.sentences)),
            start,
            FederationSettings(shared="all"),
            training,
            Run(Path(folder)),
            seed=0,
            exchange=exchange,
            on_event=told.append,
        )

    def scored(rows: Tensor) -> tuple[list[float], list[float]]:
        with torch.no_grad():
            probe = Text(model, names, rows, ("", 0))
            before, after = (torch.cat([probe.losses(rules, part) for part in rows.split(8)]) for rules in (start, end))
        return loss_drops(before.tolist(), after.tolist()), after.tolist()

    inside, losses = zip(*(scored(rows) for rows in owned.values()), strict=True)
    found = auc([score for scores in inside for score in scores], scored(fresh)[0])
    nats = [loss for one in losses for loss in one]
    epsilon = [event["metrics"]["epsilon"] for event in told if "epsilon" in event.get("metrics", {})]
    cells = [kind, privacy.mode, f"{epsilon[-1]:.1f}" if epsilon else "-", f"{count(start):,}"]
    cells += [f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]", str(found.n)]
    cells.append(f"{math.fsum(nats) / len(nats):.2f}")
    return f"| {' | '.join(cells)} |"


def read_at_end(rows: Tensor) -> dict[str, Tensor]:
    """Sentences as `read_outputs` and `mean_outputs` take them, each read at its last token."""
    real = rows >= 0
    last = real.sum(1) - 1
    batch = {"input_ids": rows.clamp(min=0), "attention_mask": real.long(), "positions": last}
    return {**batch, "last": last, "label": last, "separator": last}


def trace(args: argparse.Namespace) -> Iterator[str]:
    """Traces the clients' sentences in the context vectors that they send, and in the mean; gives the table's rows."""
    backbone = load_backbone(BackboneSettings())
    model = backbone.model
    owned, fresh = (
        [read_at_end(encoded(backbone.tokenizer, sentences(f"{kind}{n}", args.sentences))) for n in range(args.clients)]
        for kind in ("client-", "nobody-")
    )
    attach_context(model, ContextVectorSettings())
    inside, outside = ([read_outputs(model, rows).flatten(1) for rows in part] for part in (owned, fresh))
    known = read_outputs(model, read_at_end(encoded(backbone.tokenizer, sentences("attacker", KNOWN)))).flatten(1)
    usual = float(known.norm(dim=1).median())
    for multiplier in NOISE:
        clip = usual if multiplier is not None else 0.0
        # One sentence for another moves a mean of n clipped ones by 2 clip / n at most.
        std = 2 * clip / args.sentences * (multiplier or 0.0)
        settings = ContextVectorSettings(position="last", clip_norm=clip, noise_std=std)
        noise = torch.Generator().manual_seed(0)
        sent = [mean_outputs(model, [rows], settings, noise).flatten().double() for rows in owned]
        mean = torch.stack(sent).mean(0)
        clean = torch.stack([rows.mean(0) for rows in inside]).mean(0).double()
        for what, shown in (("a client's vectors", sent), ("the mean of all", [mean] * len(sent))):
            members, others = (
                [score for rows, one in zip(part, shown, strict=True) for score in traces(rows, one, known)]
                for part in (inside, outside)
            )
            found = auc(members, others)
            epsilon = f"{epsilon_of([(multiplier, 1.0, 1)], 1e-5):.1f}" if multiplier else "-"
            kept = torch.stack([torch.nn.functional.cosine_similarity(one, clean, dim=0) for one in shown]).mean()
            bounds = "-" if multiplier is None else f"clip {clip:.0f}, noise {std:.2g}"
            cells = [what, bounds, epsilon, f"{mean.numel():,}"]
            cells += [f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]", str(found.n), f"{float(kept):.2f}"]
            yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--kinds", default=",".join([*SETTINGS, CONTEXT]))
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = args.kinds.split(",")
    ways = [PrivacySettings()]
    if COUNTED:
        ways.append(PrivacySettings(mode="central", clip=1.0, noise_multiplier=1.0, noise_seed=0))
    if trained := [kind for kind in kinds if kind != CONTEXT]:
        print_head("| shared", "nats/token on the clients' own")
    for kind in trained:
        for privacy in ways:
            print(attack(kind, privacy, args), flush=True)
    if CONTEXT in kinds:
        print_head("\n| context vectors", "cosine with the clean mean of all")
        for row in trace(args):
            print(row, flush=True)


def print_head(shared: str, last: str) -> None:
    """The head of a table."""
    print(f"{shared} | noise | epsilon | numbers | AUC of the probe | sentences | {last} |")
    print("|---|---|---|---|---|---|---|")


if __name__ == "__main__":
    main()
