"""A flag's definition says under which other flags or models it is read: refusals, notes and help follow from it."""

import pytest
from support.messages import naming

from pipeline.configuration.flag_checks import idle_flags, states
from pipeline.configuration.flag_table import flag, flag_table
from pipeline.configuration.flags import parse, scan
from pipeline.configuration.groups import Group, ModelConfig
from pipeline.configuration.help import help_text, topic_help
from pipeline.errors import ContradictionError
from step3_ppo.config import PPOConfig
from step3_ppo.flags.methods import METHODS
from website import flags as pages

CONFIGS = {**pages.STAGES, **pages.COMMANDS}
RULES = ("read_if", "excludes", "needs")


class MadeUpModel(ModelConfig):
    """Model"""

    rank: int = flag(0, "Rank")
    size: int = flag(4, "Size", read_if="--rank")


class MadeUp(Group):
    """A command with made-up flags."""

    actor: MadeUpModel = MadeUpModel()
    critic: MadeUpModel = MadeUpModel()
    way: str = flag("slow", "Way")
    rate: float = flag(0.0, "Rate")
    names: list[str] = flag([], "Names")
    number: int = flag(1, "Number", read_if="--way quick or best")
    limit: float = flag(2.0, "Limit", read_if="--rate or --names")
    label: str = flag("none", "Label", excludes="--way quick", read_if="--names")
    shared: int = flag(3, "Of both", needs="--rank 2 or 3")
    words: str = flag("", "Words", kind="text", excludes="--way quick")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--number 1", ""),
        ("--number 2", "--number: got 2 (command line): it needs --way quick or best, got --way slow; leave it out"),
        ("--number 2 --way best", ""),
        ("--limit 3", "--limit ... needs --rate or --names, got --rate 0.0, --names none"),
        ("--limit 3 --rate 0.5", ""),
        ("--limit 3 --names a", ""),
        ("--label own --names a", ""),
        ("--label own", "--label: got 'own' ... needs --names"),
        ("--label own --names a --way quick", "--label: got 'own' ... not go with --way quick; leave it out"),
        ("--label none --way quick", ""),
        (
            "--words private --way quick",
            "--words: got a text (command line): it does not go with --way quick; leave it out",
        ),
        ("--critic-size 5 --actor-rank 2", "--critic-size ... needs --critic-rank, got --critic-rank 0"),
        ("--critic-size 5 --critic-rank 2", ""),
    ],
)
def test_another_value_than_the_default_is_refused_where_nothing_reads_it(words: str, says: str) -> None:
    if not says:
        assert parse(MadeUp, words.split(), section="made-up")
        return
    with pytest.raises(ContradictionError) as refused:
        parse(MadeUp, words.split(), section="made-up")
    assert str(refused.value).splitlines() == [naming(says)]


@pytest.mark.parametrize(("words", "count"), [("", 1), ("--critic-rank 3", 0), ("--actor-rank 1", 1)])
def test_what_a_flag_of_all_models_needs_is_met_by_one_of_them(words: str, count: int) -> None:
    given = parse(MadeUp, ["--shared", "5", *words.split()], section="made-up")
    found = [line for line in idle_flags(given.config, given.origins) if line.startswith("--shared ")]
    assert len(found) == count
    assert all(line == naming("--shared 5 ... --rank 2 or 3 ... --actor-rank ... --critic-rank 0") for line in found)


def test_help_says_under_which_condition_a_flag_is_read() -> None:
    text = " ".join(help_text(MadeUp, "x", ["--help-all"]).split())
    for words in ("Number (only with --way quick or best)", "Size (only with --critic-rank)"):
        assert words in text
    assert "Label (only with --names, not with --way quick)" in text
    assert "(only with --rate or --names)" in " ".join(topic_help("limit", {"x": MadeUp}).split())


@pytest.mark.parametrize("title", CONFIGS)
def test_each_condition_names_flags_of_its_command_and_values_of_these(title: str) -> None:
    table = flag_table(CONFIGS[title])
    for one, condition in ((one, getattr(one, rule)) for one in table.values() for rule in RULES):
        for name, values in scan(one.in_words(condition).replace(" or ", " ").split()):
            if name == "":  # a model
                continue
            meant = [other for other in table.values() if name in (other.name, other.path[-1])]
            assert meant, f"{one.name}: {condition}"
            choices = {str(word) for other in meant for word in other.choices}
            assert not choices or {*values} <= choices, f"{one.name}: {condition}"


@pytest.mark.parametrize("method", METHODS)
def test_conditions_on_the_method_are_what_the_method_does(method: str) -> None:
    start = ["--teacher-model", "t"] if METHODS[method].has_teacher else ["--reward-model", "r"]
    config = parse(PPOConfig, ["--method", method, *start], section="ppo").config
    table = flag_table(PPOConfig)
    read = {
        name: any(is_met for _, is_met in states(table[name], getattr(table[name], rule), config))
        for name, rule in (("replace_equal_groups", "read_if"), ("group_baseline", "read_if"), ("gamma", "excludes"))
    }
    does = METHODS[method]
    assert read == {
        "replace_equal_groups": does.compares,
        "group_baseline": not (does.compares or does.has_teacher),
        "gamma": does.compares,
    }
