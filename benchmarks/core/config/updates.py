"""Which settings go with the sections that change users' updates on their way to the server (compression,
aggregation and attack), or which of them come (devices)."""

from __future__ import annotations

from benchmarks.core.config.sections import TrainingConfig
from pfl_ext.aggregation.norm_bound import NormBound
from pfl_ext.aggregation.rule import MEAN, Mean
from pfl_ext.algorithms.algorithm import ALGORITHMS, Setup, trained_bytes
from pfl_ext.attacks.attack import HONEST, Attack
from pfl_ext.compression.compressor import PLAIN


def is_spooled(config: TrainingConfig) -> bool:
    """Whether all updates of a round are kept until the last has come."""
    return config.attack.chosen.colludes or not issubclass(config.aggregation.chosen, Mean | NormBound)


def counts_alike(config: TrainingConfig) -> bool:
    """Whether users' weights have no effect."""
    return not config.aggregation.chosen.weighs


def check_updates(config: TrainingConfig) -> None:
    """Refuse an algorithm that does not take such a section, and what the section cannot do.

    Raises:
        ValueError: one line that names the key and what to do.
    """
    federated = config.federated
    for section, neutral in (
        (config.compression, PLAIN),
        (config.aggregation, MEAN),
        (config.attack, HONEST),
    ):
        if section.name != neutral:
            key = section.registry.key
            _check_taken(config, f"{key} is {section.name}", f"{key} to {neutral}", key.partition(".")[0])
            if config.devices is not None:
                raise ValueError(
                    f"{key} is {section.name}, but devices are also set, which change who sends an "
                    f"update, and the two cannot be combined: set {key} to {neutral}, or devices to "
                    "none"
                )
    if config.devices is not None:
        _check_taken(config, "devices are given", "devices to none", "devices")
    if config.attack.chosen.colludes and config.compression.name != PLAIN:
        raise ValueError(
            f"attack.kind is {config.attack.name}, whose attackers see the updates of other users, but "
            f"compression does not apply to attackers: set compression.kind to {PLAIN}, or choose "
            "another attack"
        )
    if (
        getattr(federated.chosen_options, "set_aside", 0.0)
        and config.attack.chosen.images is not Attack.images
    ):
        raise ValueError(
            f"attack.kind is {config.attack.name}, which also changes the labels of attackers' held-out "
            "images, on which users are scored: set federated.options.held_out to 0, or choose another attack"
        )
    if getattr(config.compression.chosen_options, "error_feedback", False) and federated.replacement:
        raise ValueError(
            "compression.options.error_feedback is true, so each user keeps its own state and must not "
            "be drawn twice in a cohort: set federated.replacement or "
            "compression.options.error_feedback to false"
        )
    if is_spooled(config) and federated.replacement:
        key = "attack.kind" if config.attack.chosen.colludes else "aggregation.kind"
        section = config.attack if config.attack.chosen.colludes else config.aggregation
        raise ValueError(
            f"{key} is {section.name}, which needs exactly one update of each user in a round: set "
            "federated.replacement to false"
        )
    _check_enough(config)


def _check_taken(config: TrainingConfig, setting: str, without: str, section: str) -> None:
    """Refuse an algorithm that has no rule for a section."""
    federated = config.federated
    if section not in federated.chosen.takes:
        others = [other for other in ALGORITHMS.names() if section in ALGORITHMS[other].takes]
        raise ValueError(
            f"{setting}, but federated.algorithm {federated.name} does not support it: set {without}, or "
            f"choose {' or '.join(others)}"
        )


def _check_enough(config: TrainingConfig) -> None:
    """Refuse a rule for which a cohort is too small; of what is asked of a cohort, not of the population.

    Raises:
        ValueError: one line with both numbers.
    """
    section = config.aggregation
    options, rule = section.chosen_options, section.chosen(section.chosen_options)
    n = -(-config.federated.cohort_size // getattr(options, "bucket_size", 1))
    if not rule.works_with(n):
        raise ValueError(
            f"aggregation.kind is {section.kind}, which needs {rule.least()}, but a round has n = {n} "
            f"updates, of which f = {rule.bad(n)} may be bad: lower aggregation.options.tolerated, or "
            "raise federated.cohort_size"
        )
    kept = getattr(options, "kept", None)
    if kept is not None and kept > n - rule.bad(n):
        raise ValueError(
            f"aggregation.options.kept is {kept}, but must be at most n - f = {n - rule.bad(n)} of a "
            "round: lower it, or set it to none"
        )


def error_bytes(config: TrainingConfig, setup: Setup) -> int:
    """Bytes on disk of the compression errors of all users who train, each of them once."""
    has_errors = getattr(config.compression.chosen_options, "error_feedback", False)
    return setup.touched * trained_bytes(setup.module) if has_errors else 0


def check_kept(config: TrainingConfig, setup: Setup) -> None:
    """Refuse updates on disk, of users or of a round, that are larger than the config allows; and an attack
    of nobody.

    Raises:
        ValueError: one line with both sizes.
    """
    attack, users = config.attack, setup.users.num_users
    if attack.kind != HONEST and round(attack.share * users) == 0:
        raise ValueError(
            f"attack.share is {attack.share:g}, with which none of the {users:,} users is an attacker: "
            f"raise it, or set attack.kind to {HONEST}"
        )
    size, options = trained_bytes(setup.module) / 1e9, config.compression.chosen_options
    errors = error_bytes(config, setup) / 1e9
    if errors and errors > options.max_state_gb:
        raise ValueError(
            f"error feedback keeps {errors:,.1f} GB on disk for {setup.touched:,} users, above "
            f"compression.options.max_state_gb = {options.max_state_gb:g}: raise this limit, set "
            "compression.kind to random_k or uniform, or set compression.options.error_feedback to "
            "false"
        )
    rule, cohort = config.aggregation.chosen_options, setup.cohort_size
    most = getattr(rule, "max_state_gb", None)
    if most is not None and cohort * size > most:
        raise ValueError(
            f"the updates of a round with {cohort:,} users take {cohort * size:,.1f} GB on disk, above "
            f"aggregation.options.max_state_gb = {most:g}: raise this limit, or set aggregation.kind to "
            "norm_bound"
        )
