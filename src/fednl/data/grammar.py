"""A small grammar of ours: plain sentences about nothing in particular, for filler that needs no file."""

from __future__ import annotations

import random


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(phrase.split()) for phrase in text.split("|"))


_PEOPLE = _words(
    """gardener baker carpenter teacher sailor farmer doctor painter driver student neighbour
    shopkeeper tailor fisherman musician traveller clerk porter miller widow uncle cousin judge
    nurse plumber poet scholar shepherd smith cook guide editor janitor lawyer mayor pilot singer
    weaver writer librarian"""
)
_ADJECTIVES = _words(
    """careful cheerful clever curious gloomy hungry idle kind modest nervous polite restless serious
    shy sleepy stubborn tall thoughtful tired young busy famous honest lazy loud merry practical
    quick sensible talkative"""
)
_OBJECTS = _words(
    """basket chair rope stone letter loaf coat barrel plank broom plate mirror shoe bench painting saw
    tray jar cart lid hat cup drum kite bell clock lamp shelf spoon towel brush map bag stool wheel
    pipe saucer blanket book fence"""
)
_LOOKS = _words(
    """dusty broken shiny wooden round narrow cheap faded striped damp borrowed cracked crooked dull
    flat greasy handsome light oily plain rough rusty smooth soft spotted square stained thick
    useless worn"""
)
_VERBS = _words(
    """carried repaired watched sold painted found cleaned measured hid borrowed lifted admired dropped
    examined folded ignored lost moved packed polished replaced returned rubbed shook sketched tied
    turned wrapped noticed described"""
)
_PLACES = _words(
    """river market school bridge garden station church mill harbour forest square hill meadow village
    workshop barn quarry library field bakery inn orchard pond road stable theatre valley wall yard
    courtyard"""
)
_TIMES = _phrases(
    """in the morning|after lunch|before sunset|late in the evening|during the storm|
    on a quiet afternoon|in early spring|all through the winter|at the end of the week|
    when the rain had stopped|just after the harvest|for most of the summer|
    while the others were asleep|as usual|without any hurry|for the second time"""
)
_REASONS = _phrases(
    """the weather had changed|nobody else was interested|the road was closed|
    it seemed the right thing to do|the roof was leaking|everyone had gone home|
    there was little else to do|the days were getting shorter|the water had risen|
    the wind came from the north|the children were making noise|supper was not ready|
    the old one was no longer of any use|a friend had asked for it|the shops were closed|
    the work was almost finished|it had been a long year|the bread was still warm|
    the fog had not lifted|the animals were restless"""
)
_NATURE = _words("""rain wind snow fog mist frost thunder sunlight dust smoke""")
_MOVES = _words("""drifted settled spread hung rolled moved crept lingered gathered faded""")
_SPEECH = _phrases("""thought|said|believed|had heard|knew|used to say|was sure|had read|kept repeating|doubted""")

_PATTERNS = (
    "The {adjective} {person} {verb} the {look} {object} near the {place}.",
    "{time}, the {person} {verb} a {look} {object} and walked back to the {place}.",
    "The {person} {verb} the {object} because {reason}.",
    "Although {reason}, the {adjective} {person} stayed by the {place}.",
    "Behind the {place} there was a {look} {object}, and next to it another, even more {look2}.",
    "The {nature} {move} over the {place} {time_low}.",
    "Every {person} in the {place} {speech} that {reason}.",
    "The {person} and the {person2} met at the {place}, where they {verb} the {object} together.",
    "It was not the {object} that mattered to the {person}, but that {reason}.",
    "{time}, {nature} {move} between the {place} and the {place2}.",
    "Nobody {verb} the {look} {object} as often as the {adjective} {person}.",
    "From the {place} one could see how the {person} {verb} the {object}, since {reason}.",
    "The {adjective} {person} {speech} that the {object} was too {look} for the {place}.",
    "When the {person} came to the {place}, {reason}.",
    "A {look} {object} stood in the {place}, and the {person} {verb} it {time_low}.",
    "Some say the {person} once {verb} the {object}, others that it was the {adjective} {person2}.",
)


def sentence(rng: random.Random) -> str:
    """Makes one sentence.

    Args:
        rng: draws the pattern and the words.
    """
    person, person2 = rng.sample(_PEOPLE, 2)
    look, look2 = rng.sample(_LOOKS, 2)
    place, place2 = rng.sample(_PLACES, 2)
    time = rng.choice(_TIMES)
    return rng.choice(_PATTERNS).format(
        adjective=rng.choice(_ADJECTIVES),
        person=person,
        person2=person2,
        look=look,
        look2=look2,
        object=rng.choice(_OBJECTS),
        verb=rng.choice(_VERBS),
        place=place,
        place2=place2,
        time=time[0].upper() + time[1:],
        time_low=time,
        reason=rng.choice(_REASONS),
        nature=rng.choice(_NATURE),
        move=rng.choice(_MOVES),
        speech=rng.choice(_SPEECH),
    )
