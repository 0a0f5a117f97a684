"""The demo's world: prompts about animals, answers in a small grammar, and the rule that says which answer is better.

An answer is good when it has more kind words than unkind ones. Because the rule is known, PPO can be measured against
the truth and not only against the reward model that it was trained on. `kindness` is the rule as a reward function.
"""

import re
from random import Random

ANIMALS = (
    "otter badger heron fox hare robin weasel magpie toad beaver lynx marten finch stork mole raven swan vole "
    "crane owl bison ibex gecko newt hedgehog dormouse plover stoat wren moose"
).split()
COLOURS = "red grey white brown black golden silver spotted striped pale".split()
PLACES = "river bridge mill garden harbour forest orchard tower market meadow quarry barn island valley chapel".split()
ASKS = ("Tell me about", "Describe", "What do you know of", "Say something about")

VERBS = "looked sounded acted moved seemed felt walked sang slept played worked waited".split()
KIND = "gentle cheerful brave patient polite honest warm clever calm loyal merry tender wise kind glad lovely".split()
UNKIND = "rude cruel lazy greedy bitter clumsy nasty selfish angry gloomy vain sly dull harsh noisy spiteful".split()

KIND_SHARE = 0.25  # share of the words of a random answer: low enough that SFT leaves room for PPO


def make_prompt(random: Random) -> str:
    """A request such as 'Describe the grey otter by the mill.'"""
    animal, colour, location = random.choice(ANIMALS), random.choice(COLOURS), random.choice(PLACES)
    return f"{random.choice(ASKS)} the {colour} {animal} by the {location}."


def make_answer(random: Random) -> str:
    """An answer of three clauses, such as 'It looked calm, sang rude and slept merry.'"""
    verbs = random.sample(VERBS, 3)
    words = [random.choice(KIND if random.random() < KIND_SHARE else UNKIND) for _ in verbs]
    first, second, third = (f"{verb} {word}" for verb, word in zip(verbs, words, strict=True))
    return f"It {first}, {second} and {third}."


def tone(answer: str) -> int:
    """Kind words minus unkind words."""
    words = re.findall(r"[a-z]+", answer.lower())
    return sum(word in KIND for word in words) - sum(word in UNKIND for word in words)


def is_good(answer: str) -> bool:
    """The rule: kind words outnumber unkind ones."""
    return tone(answer) > 0


def kindness(completions: list[str], **columns: object) -> list[float]:
    """1 for each answer that is good by the rule, else 0: `--reward-function demo/rule.py:kindness`."""
    return [float(is_good(answer)) for answer in completions]


def make_pair(random: Random) -> tuple[str, str]:
    """(better, worse): two random answers of different tone."""
    while True:
        worse, better = sorted((make_answer(random) for _ in range(2)), key=tone)
        if tone(better) > tone(worse):
            return better, worse
