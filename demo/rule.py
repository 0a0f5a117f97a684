"""The demo's world: prompts about animals, answers in a small grammar, and the rule that says which answer is better.

An answer is good when it names the animal that was asked about and has more kind words than unkind ones. Because the
rule is known, PPO can be measured against the truth and not only against the reward model that it was trained on.
"""

import re
from collections.abc import Sequence
from random import Random

ANIMALS = (
    "otter badger heron fox hare robin weasel magpie toad beaver lynx marten finch stork mole raven swan vole crane owl "
    "bison ibex gecko newt hedgehog dormouse plover stoat wren moose"
).split()
COLOURS = "red grey white brown black golden silver spotted striped pale".split()
PLACES = "river bridge mill garden harbour forest orchard tower market meadow quarry barn island valley chapel".split()
ASKS = ("Tell me about", "Describe", "What do you know of", "Say something about")

VERBS = "looked sounded acted moved seemed felt walked sang slept played worked waited".split()
KIND = "gentle cheerful brave patient polite honest warm clever calm graceful loyal merry tender wise generous lovely".split()
UNKIND = "rude cruel lazy greedy bitter clumsy nasty selfish angry gloomy vain sly dull harsh noisy spiteful".split()

KIND_SHARE = 0.35  # of the words in unselected answers; low enough that SFT leaves room for PPO
RIGHT_ANIMAL_SHARE = 0.9


def make_prompt(random: Random) -> str:
    """A request such as 'Describe the grey otter by the mill.'"""
    animal, colour, place = random.choice(ANIMALS), random.choice(COLOURS), random.choice(PLACES)
    return f"{random.choice(ASKS)} the {colour} {animal} by the {place}."


def make_answer(animal: str, random: Random) -> str:
    """An answer of three clauses, such as 'The otter looked calm, sang rude and slept merry.'"""
    named = animal if random.random() < RIGHT_ANIMAL_SHARE else random.choice(ANIMALS)
    verbs = random.sample(VERBS, 3)
    words = [random.choice(KIND if random.random() < KIND_SHARE else UNKIND) for _ in verbs]
    first, second, third = (f"{verb} {word}" for verb, word in zip(verbs, words, strict=True))
    return f"The {named} {first}, {second} and {third}."


def animal_of(prompt: str) -> str:
    """The animal that a prompt asks about."""
    return next(word for word in words_of(prompt) if word in ANIMALS)


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def quality(prompt: str, answer: str) -> int:
    """Kind minus unkind words, plus 2 for the right animal; how pairs are ordered."""
    words = words_of(answer)
    tone = sum(word in KIND for word in words) - sum(word in UNKIND for word in words)
    return tone + 2 * (animal_of(prompt) in words)


def is_good(prompt: str, answer: str) -> bool:
    """The rule: the right animal is named, no other one, and kind words outnumber unkind ones."""
    words = words_of(answer)
    tone = sum(word in KIND for word in words) - sum(word in UNKIND for word in words)
    return tone > 0 and {word for word in words if word in ANIMALS} == {animal_of(prompt)}


def make_pair(prompt: str, random: Random) -> tuple[str, str]:
    """(better, worse): two answers of different quality."""
    while True:
        answers: Sequence[str] = [make_answer(animal_of(prompt), random) for _ in range(2)]
        worse, better = sorted(answers, key=lambda answer: quality(prompt, answer))
        if quality(prompt, better) > quality(prompt, worse):
            return better, worse
