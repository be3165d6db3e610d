"""The numbers that the papers print, as they print them, each with its source. Nothing here was measured."""

from __future__ import annotations

from fednl.reproduce.table import Published

FEDNL = "FedNL, arXiv 2605.16350"

NEEDLES = Published(
    what="accuracy on four choices, %",
    source=f"{FEDNL}, its needle table, final round",
    model="not stated beside the table",
    columns=(
        "multi-key",
        "multi-value",
        "passkey",
        "uuid-code",
        "name-date",
        "phrase-code",
        "counter-state",
        "average",
    ),
    rows={
        "FedAvg": (16.0, 24.0, 24.0, 16.0, 16.0, 20.0, 12.0, 18.3),
        "FedProx": (24.0, 16.0, 24.0, 8.0, 16.0, 32.0, 20.0, 20.0),
        "FedSSI": (16.0, 24.0, 24.0, 16.0, 16.0, 20.0, 12.0, 18.3),
        "Fed-Mamba": (12.0, 20.0, 20.0, 20.0, 20.0, 28.0, 12.0, 18.9),
        "FedALA": (40.0, 40.0, 33.3, 33.3, 13.3, 20.0, 20.0, 28.6),
        "FFA-LoRA": (13.3, 20.0, 26.7, 13.3, 13.3, 13.3, 6.7, 15.2),
        "FedNL": (32.0, 40.0, 24.0, 48.0, 24.0, 28.0, 12.0, 29.7),
    },
    notes=(
        "Chance is 25%. The paper gives neither intervals nor seeds, and no attention window.",
        "Its values are multiples of 1/25, those of FedALA and FFA-LoRA of 1/15: they were scored on other test sets, "
        "25 and 15 questions a client at 1,024 to 16,384 or 4,096 tokens (inferred).",
        "FedSSI's line is FedAvg's in every cell.",
    ),
)

MMLU_COLUMNS = ("law-ethics", "humanities", "stem", "math-cs", "med-psy", "average")
_NOTES_MMLU = (
    "Chance is 25%. The clients were made of MMLU's test split, one question in six for testing, so the numbers are "
    "not those of MMLU's usual protocol.",
    "About 983 questions: one standard error of an average is 1.5 points, more than what parts most of the lines.",
)


def _only_average(**averages: float) -> dict[str, tuple[float | None, ...]]:
    return {name.replace("_", "-"): (None, None, None, None, None, value) for name, value in averages.items()}


MMLU_QWEN = Published(
    what="accuracy, %, Qwen2.5-1.5B",
    source=f"{FEDNL}, table 1",
    model="Qwen2.5-1.5B",
    columns=MMLU_COLUMNS,
    rows=_only_average(FedAvg=58.0, FedProx=58.0, FedSSI=58.7, FedALA=58.08, FFA_LoRA=58.11)
    | {"FedNL": (44.5, 71.5, 55.0, 51.9, 71.5, 58.88)},
    heading="average, Qwen2.5-1.5B",
    notes=_NOTES_MMLU,
)
MMLU_LLAMA = Published(
    what="accuracy, %, Llama-3.2-1B",
    source=f"{FEDNL}, table 1",
    model="Llama-3.2-1B",
    columns=MMLU_COLUMNS,
    rows=_only_average(FedAvg=41.2, FedProx=38.2, FedSSI=42.1, FedALA=40.59, FFA_LoRA=40.75, Fed_Mamba=26.7)
    | {"FedNL": (33.5, 43.5, 38.5, 43.7, 54.0, 42.64)},
    heading="average, Llama-3.2-1B",
    notes=(*_NOTES_MMLU, "Fed-Mamba is a Mamba of 1.4 billion parameters."),
)

IFED_ICL = "IFed-ICL, arXiv 2511.06757"
_NOTES_IFED = (
    "5,000 examples for training and 500 for testing, ten clients, Dirichlet 0.5. No intervals, no seeds.",
    "Zero-shot and FedAvg-LoRA are printed with the same numbers for both models on SUBJ and Emotion.",
)


_Pair = tuple[float, float]
"""Of Llama-3-8B and of Qwen2.5-7B."""


def _ifed(data: str, zero: float, local: _Pair, lora: _Pair, ours: _Pair, *more: str) -> Published:
    return Published(
        what=f"accuracy, %, {data}",
        source=f"{IFED_ICL}, its accuracy table",
        model="Qwen2.5-7B and Llama-3-8B",
        columns=("Qwen2.5-7B", "Llama-3-8B"),
        rows={
            "zero-shot": (zero, zero),
            "local ICL": (local[1], local[0]),
            "FedAvg-LoRA": (lora[1], lora[0]),
            "IFed-ICL": (ours[1], ours[0]),
        },
        heading=f"{data}, Llama-3-8B",
        notes=(*_NOTES_IFED, *more),
    )


_EMO = "The paper cites EmoContext, of four classes; here it is dair-ai/emotion, of six."
SUBJ = _ifed("SUBJ", 62.6, (70.0, 70.8), (66.0, 66.0), (91.2, 81.2))
EMOTION = _ifed("Emotion", 52.2, (49.8, 49.7), (54.6, 54.6), (67.4, 60.8), _EMO)
AG_NEWS = _ifed("AG News", 82.4, (75.0, 74.9), (79.0, 80.0), (91.6, 90.6))

TRAFFIC_FEDNL = Published(
    what="traffic of a client in a round, MB as printed",
    source=f"{FEDNL}, section 3.5",
    model="Llama-3.2-1B by its counts",
    columns=("numbers shared", "MB, client to server"),
    rows={"FedNL": (32_768.0, 0.26), "FedAvg": (11_272_192.0, 22.5)},
    heading="MB, client to server",
    notes=(
        "Called fp16 for both, but 32,768 numbers are 0.066 MB at two bytes; 0.26 MB takes eight bytes a number, "
        "22.5 MB two. In one unit the ratio is 344.",
        "In all, 7 clients and 2 rounds: 3.6 MB and 1.26 GB as printed, both at eight bytes a number.",
        "FedNL's count is of the memory's own rules; its Algorithm 1 shares LoRA as well.",
    ),
)
TRAFFIC_IFED = Published(
    what="traffic of a client in a round, KB as printed (SUBJ, Llama-3-8B)",
    source=f"{IFED_ICL}, its traffic table",
    model="Llama-3-8B",
    columns=("first round up, KB", "KB, each round"),
    rows={"IFed-ICL": (514.0, 1.8), "FedAvg-LoRA": (13_357.78, 13_357.78)},
    heading="KB, each round, Llama-3-8B",
    notes=("1.8 KB are 128 coefficients of two bytes in a container of 1.6 KB; the LoRA has rank 8 on q and v.",),
)

STREAMING = Published(
    what="streaming cross-entropy over 16K tokens: change from the first bin of 1,024 tokens to the last, %",
    source=f"{FEDNL}, its streaming probe",
    model="not stated beside the figure",
    columns=("change, %",),
    rows={"FedAvg": (3.1,), "FedNL": (-2.1,)},
    heading="change, %",
    notes=(
        "Each method is divided by its own first bin, so that the levels are not known; the texts are held-out needle "
        "prompts of 16K tokens. Whether the last bin or a trend is meant, and how many texts were read, is not stated.",
    ),
)

ABLATION = Published(
    what="perplexity on PG-19",
    source=f"{FEDNL}, its ablation figure",
    model="not stated beside the figure",
    columns=("perplexity",),
    rows={
        "FedNL": (29.82,),
        "without LoRA": (149.46,),
        "without its memory gate": (348.97,),
        "Hebbian in place of delta": (1576.42,),
    },
    heading="perplexity",
    notes=("Length, stride and rounds of its protocol are not stated.",),
)
