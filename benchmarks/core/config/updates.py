"""Which settings go with the sections that change users' updates on their way to the server."""

from __future__ import annotations

from benchmarks.core.config.sections import ChoosingSection, TrainingConfig
from pfl_ext.algorithms.algorithm import ALGORITHMS, Setup, trained_bytes
from pfl_ext.compression.compressor import PLAIN


def check_updates(config: TrainingConfig) -> None:
    """Refuse an algorithm that does not take such a section, and what the section cannot do.

    Raises:
        ValueError: one line that names the key and what to do.
    """
    compression = config.compression
    if compression.kind != PLAIN:
        _check_taken(config, compression, PLAIN)
    if getattr(compression.chosen_options, "error_feedback", False) and config.federated.replacement:
        raise ValueError(
            "compression.options.error_feedback is true, and a user keeps one state of its own, so must come "
            "once in a cohort: set federated.replacement or compression.options.error_feedback to false"
        )


def _check_taken(config: TrainingConfig, section: ChoosingSection, neutral: str) -> None:
    """Refuse an algorithm whose users send something else than one update that is averaged."""
    key, federated = section.registry.key, config.federated
    name = key.partition(".")[0]
    if name not in federated.chosen.takes:
        others = [other for other in ALGORITHMS.names() if name in ALGORITHMS[other].takes]
        raise ValueError(
            f"{key} is {section.name}, and federated.algorithm {federated.name} does not take it: set {key} "
            f"to {neutral}, or choose {' or '.join(others)}"
        )


def check_kept(config: TrainingConfig, setup: Setup) -> None:
    """Refuse a state of users that is larger than the config allows.

    Raises:
        ValueError: one line with both sizes.
    """
    options = config.compression.chosen_options
    if not getattr(options, "error_feedback", False):
        return
    touched = min(setup.users.num_users, setup.cohort_size * setup.num_rounds)
    state = touched * trained_bytes(setup.module) / 1e9
    if state > options.max_state_gb:
        raise ValueError(
            f"error feedback keeps {state:,.1f} GB for {touched:,} users, above "
            f"compression.options.max_state_gb = {options.max_state_gb:g}: raise it, choose random_k or "
            "uniform, or set compression.options.error_feedback to false"
        )
