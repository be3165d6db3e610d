"""The public practice task: generated text from which public rules are trained; no client holds any of it."""

from __future__ import annotations

import random
from dataclasses import replace

from fednl.data.examples import Needle, NeedleExample, Splits, Tokenizer, encode_needles
from fednl.data.fillers import FillerText, generated_text, tokenize
from fednl.data.haystack import GAP_TOKENS, LEAD_TOKENS, check_budget, place
from fednl.data.needle_clients import CANDIDATES, shuffled
from fednl.data.relations import KEYS, PREFIXES, RELATIONS, VALUES, Draw, Relation
from fednl.data.settings import DataSettings
from fednl.errors import SettingsError
from fednl.seeding import python_rng, seed_of

FEWEST_EVENTS, MOST_EVENTS = 2, 6
# A generous size of one public event in word-piece tokens; sets how many a small budget gets.
_EVENT_TOKENS = 22


def public_needle(rng: random.Random, most_events: int = MOST_EVENTS) -> Needle:
    """Draws the facts, the question and the answers of one practice example.

    All facts of an example have the same kind of value; their relation and wording are one for all or mixed.

    Args:
        rng: draws everything.
        most_events: the largest number of facts, at least 2.
    """
    kind = rng.choice(sorted(VALUES))
    fitting = [relation for relation in RELATIONS if kind in relation.values]
    # Where there is room every wrong candidate stands in the text too: knowing which values do is no answer.
    count = rng.randint(min(CANDIDATES, most_events), most_events)
    one_relation, one_wording = rng.random() < 0.7, rng.random() < 0.5
    values = _distinct(rng, VALUES[kind], max(count, CANDIDATES), [])
    relation, attribute, wording = _wording(rng, fitting)
    events, keys, asked = [], list[str](), []
    for value in values[:count]:
        if not one_relation:
            relation, attribute, wording = _wording(rng, fitting)
        elif not one_wording:
            wording = rng.choice(relation.events)
        # A key is no part of a value either: a question must point at one sentence.
        keys += _distinct(rng, KEYS[relation.key], 1, [*keys, *values])
        events.append(_fill(wording, keys[-1], attribute, value))
        asked.append((relation, attribute))
    queried = rng.randrange(count)
    questions = [
        rng.choice(PREFIXES) + _fill(rng.choice(relation.questions), key, attribute, "")
        for key, (relation, attribute) in zip(keys, asked, strict=True)
    ]
    observed = [value for i, value in enumerate(values[:count]) if i != queried]
    wrong = rng.sample(observed, min(len(observed), CANDIDATES - 1))
    wrong += values[count:][: CANDIDATES - 1 - len(wrong)]
    candidates, gold = shuffled(rng, values[queried], wrong)
    others = [i for i in range(count) if i != queried]
    rng.shuffle(others)
    further = tuple((questions[i], values[i]) for i in others)
    return Needle(tuple(events), queried, questions[queried], candidates, gold, tuple(values), further)


def _wording(rng: random.Random, relations: list[Relation]) -> tuple[Relation, str, str]:
    relation = rng.choice(relations)
    return relation, rng.choice(relation.attributes), rng.choice(relation.events)


def _fill(template: str, key: str, attribute: str, value: str) -> str:
    text = template.format(key=key, Key=key[:1].upper() + key[1:], attr=attribute, value=value)
    return text[0].upper() + text[1:] if text[0].isalpha() and not text.startswith(value or "\0") else text


def _distinct(rng: random.Random, draw: Draw, count: int, taken: list[str]) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        new = draw(rng)
        # Neither a part of another nor the other way round, so that a value can be told apart in the text.
        if not any(new in other or other in new for other in (*found, *taken)):
            found.append(new)
    return found


def build_public(
    tokenizer: Tokenizer, n: int, tokens: int, window_tokens: int, seed: int, questions: int = 1
) -> list[NeedleExample]:
    """Makes practice examples: 4 to 6 facts of many kinds in generated filler, a question about one.

    No client's sentence, kind of value or list of keys is used. A budget of less than about 200 tokens gets
    fewer facts, at least 2. Events keep their distance from the answer as in `needles.build`.

    Args:
        tokenizer: the backbone's.
        n: how many examples.
        tokens: prompt tokens of each, question included and answer excluded.
        window_tokens: the attention window, 0 for full attention.
        seed: of everything drawn, filler included.
        questions: how many questions about its haystack training asks at most, at least 1.

    Raises:
        SettingsError: the window or the token budget is too small.

    Source: ours.
    """
    content = python_rng(seed, "public/content")
    per_event = _EVENT_TOKENS + GAP_TOKENS
    most = max(FEWEST_EVENTS, min(MOST_EVENTS, (tokens - window_tokens - LEAD_TOKENS) // per_event))
    encoded = encode_needles([public_needle(content, most) for _ in range(n)], tokenizer, "candidates", questions - 1)
    check_budget(encoded, tokens, window_tokens, "candidates")
    if not encoded:
        return []
    text = generated_text(python_rng(seed, "public/filler"))
    region = tokenize(FillerText("generated", text, "", len(text)), tokenizer)
    if len(region.ids) < tokens:
        raise SettingsError(
            f"data.tokens is {tokens}, more than the generated filler's {len(region.ids)} tokens; lower it."
        )
    rng = python_rng(seed, "public/places")
    return [
        place(one, region, tokens, window_tokens, rng, client="public", split="public", index=index)
        for index, one in enumerate(encoded)
    ]


def build(
    settings: DataSettings, tokenizer: Tokenizer, window_tokens: int, answer: str, seed: int
) -> dict[str, Splits[NeedleExample]]:
    """Makes the practice task a task of its own: one client, `public`, so that `fednl train` makes public rules.

    Of the settings it reads `tokens`, `questions` and the three counts. Each split has its own facts and its own
    generated filler.

    Args:
        settings: the `[data]` section.
        tokenizer: the backbone's.
        window_tokens: the attention window, 0 for full attention.
        answer: `"candidates"` or `"recall"`.
        seed: the run's seed.

    Raises:
        SettingsError: the window or the token budget is too small, or the answer format is another.
    """
    if answer == "letters":
        raise SettingsError('evaluation.answer is "letters"; the public task knows "candidates" and "recall".')
    counts = {"train": settings.train, "validation": settings.validation, "test": settings.test}
    splits = {}
    for split, count in counts.items():
        questions = settings.questions if split == "train" else 1
        own_seed = seed_of(seed, f"public/{split}")
        made = build_public(tokenizer, count, settings.tokens, window_tokens, own_seed, questions)
        splits[split] = [replace(example, split=split) for example in made]
    return {"public": Splits(**splits)}
