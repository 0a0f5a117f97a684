"""The paths of the pages that are made from the code, below docs/, and what makes each."""

from collections.abc import Callable, Mapping
from pathlib import Path

from website import errors, flags, metrics, origins, rewards, trl

PRESETS = Path(__file__).resolve().parent.parent / "benchmarks" / "reports" / "presets.md"


def presets() -> str:
    """Return the text of reference/presets.md: the report that `make plans` writes in some minutes."""
    return PRESETS.read_text(encoding="utf-8")


PAGES: Mapping[str, Callable[[], str]] = {
    "coming_from/trl.md": trl.page,
    "reference/flags.md": flags.page,
    "reference/metrics.md": metrics.page,
    "reference/exit_codes.md": errors.exit_codes,
    "reference/presets.md": presets,
    "reference/which_value.md": origins.page,
    "reference/rewards.md": rewards.page,
    "trouble/errors.md": errors.page,
}
