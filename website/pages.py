"""The paths of the pages that are made from the code, below docs/, and what makes each."""

from collections.abc import Callable, Mapping

from website import errors, flags, metrics, presets, rewards, trl

PAGES: Mapping[str, Callable[[], str]] = {
    "coming_from/trl.md": trl.page,
    "reference/flags.md": flags.page,
    "reference/metrics.md": metrics.page,
    "reference/exit_codes.md": errors.exit_codes,
    "reference/presets.md": presets.site_page,
    "reference/rewards.md": rewards.page,
    "trouble/errors.md": errors.page,
}
