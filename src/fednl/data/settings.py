"""The `[data]` section of a settings file."""

from __future__ import annotations

from pydantic import Field

from fednl.section import Section


class DataSettings(Section):
    """Which task the clients hold, how long its examples are, and how many of them there are.

    Attributes:
        task: a name in `fednl.data.TASKS`.
        tokens: prompt tokens of every example, question included and answer excluded.
        shortest: above 0, needles' training prompts are of mixed lengths, drawn between this and `tokens` so that each
            doubling is as frequent: rules learn what they should keep for longer than one length.
        clients: how many of the task's clients take part (the first n).
        hold_out_clients: names of clients that have no training and no validation examples, only test.
        train: training examples per client (in a stream, per client and task); 0 makes clients that take part as
            zero examples.
        imbalance: above 1 makes a long tail: `train` is what the largest kind of data has, this many times what the
            smallest has, and the others lie exponentially between; which is which is drawn by seed. Of labelled
            texts the kinds are the classes, and `train` stays the mean over clients.
        dirichlet_alpha: above 0, the needle task's clients are no kinds but hold several, in shares drawn from a
            symmetric Dirichlet distribution: small for few kinds a client, large for the same mixture everywhere.
            `train` is then the mean over clients, `imbalance` that of all kinds together, and validation and test go by
            the same shares.
        validation: validation examples per client.
        test: test examples per client.
        events: needles per haystack.
        questions: how many of a training haystack's needles are asked for, one after the other; testing always
            asks for one.
        filler: what surrounds the needles: `"standard-library"` (prose from the docstrings of the running
            Python), `"generated"` (sentences from a small grammar), a packaged set of texts or a class of it
            (`"bbc-news"`, `"bbc-news/tech"`), or the path of a UTF-8 text file.
    """

    task: str = "needles"
    tokens: int = Field(default=320, ge=1)
    shortest: int = Field(default=0, ge=0)
    clients: int = Field(default=7, ge=1)
    # Not strict: TOML and JSON know lists, and a frozen section holds a tuple.
    hold_out_clients: tuple[str, ...] = Field(default=(), strict=False)
    train: int = Field(default=750, ge=0)
    imbalance: float = Field(default=1.0, ge=1, allow_inf_nan=False)
    dirichlet_alpha: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    validation: int = Field(default=15, ge=0)
    test: int = Field(default=15, ge=0)
    events: int = Field(default=4, ge=1, le=32)
    questions: int = Field(default=1, ge=1, le=32)
    filler: str = Field(default="standard-library", min_length=1)
