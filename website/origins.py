"""The page that says which value of a flag wins, from the kinds of origins."""

from pipeline.configuration.origins import Kind, Origin
from pipeline.run.resolve import RULES
from website.tables import row

INTRODUCTION = """# Which value wins

A flag may get a value from several places. The higher place in this table wins. `--dry-run --explain` prints each flag
with its value and where that came from, and `config.json` in a run's folder stores both.

"""
# Kind -> who sets the value, and a source.
MEANINGS = {
    Kind.COMMAND_LINE: ("A flag on the command line.", ""),
    Kind.FILE: ("The YAML file of `--config`.", "run.yaml"),
    Kind.PRESET: ("The preset of the model, or `--preset`.", "launch/presets/8b.yaml"),
    Kind.DEEPSPEED_JSON: ("The JSON file of `--deepspeed-config`.", "ds.json"),
    Kind.EARLIER_RUN: (
        "The run that resumes: its rollout size.",
        "in place of 0 in default",
    ),
    Kind.PLAN: ("The plan, for flags that are `auto` on a GPU.", "1 x NVIDIA H100, 79.1 GiB each"),
    Kind.FOLLOWS: ("Another flag, from which the value is computed.", "--train-batch-size 64 on 2 ranks"),
    Kind.METHOD: ("The method of stage 3, such as `--method grpo`.", "grpo"),
    Kind.DEFAULT: ("The default of the flag.", ""),
}
RULES_INTRODUCTION = """
## In which order

The command line, files and defaults are merged first. Then these rules are applied, one after the other. They set
flags that nobody gave; where one replaces a value that was given, a note or the origin says so.

"""
EXCEPTIONS = """
## Exceptions

- **Contradictions are errors.** A DeepSpeed JSON that says something else than a flag, a file or a preset is refused
  with both values. Write `"auto"` into the JSON to leave the value to the flag.
- **A flag that was given twice**: the last one counts, and a note says so.
- **Batches**: `--gradient-accumulation-steps` follows from `--train-batch-size` where both are given, since the rows
  of a step are what learning rates are meant for. `--gradient-accumulation-steps` in a higher place ends that.
- **`--auto fit`** may replace values of yours to make a run fit; the log names each.
- **Presets**: other methods than PPO ignore a preset's values for PPO and its critic.
- **Resuming**: a flag that changes what is learned must have the value of the checkpoint, or the run ends with both.
  [Resume](../guides/resume.md) says which flags may change.
"""


def page() -> str:
    """Return the text of reference/which_value.md."""
    rows = [row(meaning, f"`{Origin(kind, source)}`") for kind, (meaning, source) in sorted(MEANINGS.items())[::-1]]
    table = "\n".join([row("Set by", "Printed as"), row("---", "---"), *rows])
    lines = [row(moment, rule.text) for moment, rules in RULES.items() for rule in rules]
    rules = "\n".join([row("When", "What"), row("---", "---"), *lines])
    return f"{INTRODUCTION}{table}\n{RULES_INTRODUCTION}{rules}\n{EXCEPTIONS}"
