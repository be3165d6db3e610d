"""The classes of sets that papers on in-context learning use, named by one word in `classification.labels`."""

from __future__ import annotations

from collections.abc import Collection

WELL_KNOWN: dict[str, tuple[tuple[str, str], ...]] = {
    "ag-news": (("World", "World"), ("Sports", "Sports"), ("Business", "Business"), ("Sci/Tech", "Technology")),
    "subj": (("objective", "objective"), ("subjective", "subjective")),
    "emotion": tuple((word, word) for word in ("sadness", "joy", "love", "anger", "fear", "surprise")),
    "emo": tuple((word, word) for word in ("others", "happy", "sad", "angry")),
}
"""Per set the classes in the order of their numbers: the name on the hub, and the word that stands for it in a prompt.

On the hub: `fancyzhx/ag_news`, `SetFit/subj`, `dair-ai/emotion` and `emo` (EmoContext, what IFed-ICL calls Emotion).
Source: the sets' own cards; the words those of I2CL (arXiv 2405.14660).
"""


def well_known_words(name: str, found: Collection[str]) -> dict[str, str]:
    """Gives the word for each class of a well-known set, in the order of its numbers.

    Args:
        name: a key of `WELL_KNOWN`.
        found: the classes as they stand in the source: names, or numbers from 0 on where a file lost them.

    Returns:
        Class as in the source -> word.
    """
    numbered = all(label.isdecimal() for label in found)
    return {str(i) if numbered else label: word for i, (label, word) in enumerate(WELL_KNOWN[name])}
