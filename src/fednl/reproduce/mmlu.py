"""The MMLU table: five unlike clients, four choices, their letters are scored. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from fednl.evaluation.measures import MMLU
from fednl.reproduce import papers, settings
from fednl.reproduce.comparison import Asked, Shown, answered, written
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Method, Page, Scale, Table

FEDNL = Method("fednl", settings.FEDNL)
OWN = Method("own-rules", ("federation.algorithm=local-only", "lora.rank=0"))
_LORA, _SIZE = (*settings.LORA, settings.FULL), settings.LORA_SIZE
FEDAVG = Method("fedavg-lora", (*_LORA, "federation.algorithm=fedavg"), _SIZE)
FEDPROX = Method("fedprox-lora", (*_LORA, "federation.algorithm=fedprox"), _SIZE)
FEDALA = Method("fedala-lora", (*_LORA, "federation.algorithm=fedala"), (*_SIZE, *settings.FEDALA_PASSES))
FFA = Method("ffa-lora", (*_LORA, "federation.algorithm=ffa-lora"), _SIZE)
_LORA_METHODS = (FEDAVG, FEDPROX, FEDALA, FFA)

LINES = (
    Line("FedNL", FEDNL, "federated", "FedNL"),
    Line("FedAvg-LoRA", FEDAVG, "federated", "FedAvg"),
    Line("FedProx-LoRA", FEDPROX, "federated", "FedProx"),
    # With one task its penalty is always 0: FedAvg to the bit, as its tests hold it to.
    Line("FedSSI-LoRA (with one task FedAvg)", FEDAVG, "federated", "FedSSI"),
    Line("FedALA-LoRA", FEDALA, "federated", "FedALA"),
    Line("FFA-LoRA", FFA, "federated", "FFA-LoRA"),
    Line("each client's own rules", OWN),
    Line("window only, untrained", FEDNL, "window-only"),
    Line("full attention, untrained", FEDNL, "full-attention"),
)
_READING = (
    "FedNL reads through a window at constant memory; the LoRA lines read with full attention. Each client's own rules "
    "are trained alone for as many steps: FedNL minus those is what sharing gives or, below zero, costs. The packaged "
    "questions are not the paper's: MMLU's own are there with --set mmlu.source=cais/mmlu, or a folder of its files."
)


_TITLES = {"letters": "a letter of four", "candidates": "the text of one of four"}


def work(sitting: Sitting) -> Iterator[Page]:
    """Trains run by run, asks each the same questions, and gives the table after each."""
    answer = sitting.config(FEDNL).evaluation.answer
    asked = [Asked("mmlu", _TITLES.get(answer, answer), LINES, MMLU.metrics_of(answer))]
    for found in answered(sitting, asked):
        yield written(sitting, asked, found, Shown((papers.MMLU_QWEN, papers.MMLU_LLAMA), _READING))


_TASK = ("data.task=mmlu", "evaluation.answer=letters", "evaluation.arms=[]")
_TINY = Scale(
    about="seconds",
    sets=(
        *_TASK,
        *settings.TINY,
        "mmlu.source={folder}/questions.jsonl",
        "data.tokens=300",
        "data.train=3",
        "data.test=3",
    ),
)
_SMALL = Scale(
    about="SmolLM2-135M on the packaged questions, which it answers no better than guessing: it shows the path, "
    "and no more",
    sets=(
        *_TASK,
        *settings.SMOLLM2,
        "mmlu.source=packaged",
        "mmlu.long-questions=leave-out",
        "data.tokens=512",
        "data.clients=5",
        "data.train=200",
        "data.validation=0",
        "data.test=40",
        "memory.window-tokens=128",
        "training.rounds=2",
        "training.local-steps=8",
        "training.local-lr=1e-3",
    ),
)
_PAPER = Scale(
    about="Qwen2.5-1.5B (or any: --set backbone.id=...), cais/mmlu, the paper's counts, LoRA of rank 32 on all linears "
    "at 5e-5; how many rounds is not stated there, two are ours; a GPU of 48 GB",
    sets=(
        *_TASK,
        *settings.LLAMA_1B,
        "backbone.id=Qwen/Qwen2.5-1.5B",
        "mmlu.source=cais/mmlu",
        "mmlu.long-questions=leave-out",
        "data.tokens=1024",
        "data.clients=5",
        "data.train=2000",
        "data.validation=0",
        "data.test=200",
        "training.rounds=2",
        "training.local-steps=500",
        "training.local-lr=3e-4",
    ),
    own={method.name: settings.paper_lora(32, "5e-5") for method in _LORA_METHODS},
)
TABLE = Table(
    name="mmlu",
    about="Five clients by subject answer four-choice questions; short texts, so that memory has little to bring back.",
    scales={"tiny": _TINY, "small": _SMALL, "paper": _PAPER},
    lines=lambda scale: LINES,
    work=work,
)
