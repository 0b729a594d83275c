"""Which values of which option go with privacy, and why: one table, checked for every run.

    python -m benchmarks.core.config.privacy_matrix          the table, as Markdown

Privacy is refused by default: a private run may use an option only if this table has a row for it that allows
the value, with the argument why one user's influence on what is released stays what was accounted for. The
quantity that must stay bounded is the clipped sum of a round: without one user it may change by the clipping
bound C at most, and nothing else that the run releases or learns from may depend on that user. What the
guarantee does not cover although it is written (scores, times, counts) is listed in ``privacy.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.core.config.sections import Runtime, TrainingConfig
from benchmarks.core.config.trees import dotted
from dataset.cli import run as run_command

Values = tuple[Any, ...] | None  # None: any value


@dataclass(frozen=True)
class Rule:
    """What one option may be in a private run."""

    argument: str
    """Why the allowed values keep the guarantee, and why the others do not."""
    central: Values = None
    """Allowed with ``privacy``; None: any."""
    local: Values = None
    """Allowed with ``local_privacy``; None: any."""

    def allows(self, section: str, value: Any) -> bool:
        """Whether a value goes with ``section``, ``privacy`` or ``local_privacy``."""
        values = self.central if section == "privacy" else self.local
        return values is None or value in values


OF_THE_DATA = "says which images there are and whose they are: the data set that the guarantee is about"
OF_THE_NETWORK = "fixed before training, and looks at no training image"
BEFORE_CLIPPING = "acts on one user's images and update, before that update is clipped"
AFTER_NOISE = "works on the noisy mean alone: post-processing"
NOT_OF_TRAINING_USERS = "looks at val and test users, and at the released model"
UNUSED = "not read in federated training"
ACCOUNTED = "is what the accountant computes with"
ONE_KIND = "no accounting here is for both kinds of privacy at once"
SIMULATED = "the noise of another system; the run's own epsilon is computed and reported beside it"
SEEDED = "entropy is secret; run is public, for research only, and said wherever epsilon is"
ROUNDING = "changes the sum by rounding in float32 at most"
READING = "how images are read, not which"
REPEATED = "checkpoints hold what was released; a round made again has the same noise: benchmarks.core.secret"
WATCHING = "where lines and files go; what of them is covered, privacy.json says"


def _each(argument: str, section: str, keys: str) -> dict[str, Rule]:
    """The same rule for several keys of a section: any value."""
    return {f"{section}.{key}": Rule(argument) for key in keys.split()}


def _only(argument: str, *values: Any) -> Rule:
    return Rule(argument, values, values)


TABLE: Mapping[str, Rule] = {
    "setting": Rule("a name"),
    "mode": _only("centralised training has no user updates to clip", "federated"),
    "seed": Rule("decides initialisation, crops and the order of images; with noise_seed=entropy no noise"),
    **_each(OF_THE_DATA, "data", "image_size taxonomy binary_label partition dataset"),
    "data.scored": _only("val may be carved from training users' images; its scores are exact", "test"),
    "data.val_share": Rule("read for data.scored=val alone, which is refused"),
    **_each(OF_THE_NETWORK, "model", "arch input_size groups bottleneck trained init"),
    "model.weights_sha256": Rule("names the file that model.pretrained is about"),
    "model.pretrained": Rule("the weights' own training data is not covered, and privacy.json says so"),
    **_each(BEFORE_CLIPPING, "augment", "crop flip"),
    **_each(BEFORE_CLIPPING, "local", "learning_rate effective_learning_rate num_epochs batch_size"),
    **_each(BEFORE_CLIPPING, "local", "max_images cap straddle reshuffle max_grad_norm clip_by"),
    **_each(BEFORE_CLIPPING, "local", "momentum weight_decay virtual_size"),
    **_each(AFTER_NOISE, "server", "optimizer learning_rate beta1 beta2 epsilon adam_form momentum"),
    **_each(AFTER_NOISE, "server", "schedule warmup_rounds final_learning_rate"),
    "federated.algorithm": _only(
        "fedavg and fedprox send one update a user, which is clipped; fednova scales updates by their steps "
        "after that, and scaffold keeps and sends control variates that no clipping bounds",
        "fedavg",
        "fedprox",
    ),
    **_each(ACCOUNTED, "federated", "num_rounds cohort_size"),
    "federated.replacement": _only("a user drawn twice in a round would add two updates to the sum", False),
    "federated.sampling": _only(
        "the accounting is for users who are all drawn alike; a probability that grows with a user's images "
        "also depends on the others' number of images",
        "uniform",
    ),
    "federated.reweight": _only(
        "FedIR's weights hold the label counts of all training images, exactly, and enter every user's loss",
        "none",
    ),
    "federated.max_importance": Rule("caps FedIR's weights, which are refused"),
    "federated.weighting": _only(
        "a weight by images multiplies the clipped update, and the sum of the weights is not private", "users"
    ),
    "federated.mu": Rule(BEFORE_CLIPPING),
    "federated.scaffold_option": _only("read for scaffold alone, which is refused", None),
    "federated.scaffold_correction": _only("read for scaffold alone, which is refused", None),
    "federated.options": _only("those of algorithms that nobody has argued about", None),
    "federated.max_state_gb": Rule("read for scaffold alone, which is refused"),
    **_each(UNUSED, "centralised", "num_epochs batch_size optimizer learning_rate beta1 beta2 epsilon"),
    **_each(UNUSED, "centralised", "momentum weight_decay max_grad_norm"),
    **_each(UNUSED, "evaluation", "every_epochs"),
    **_each(NOT_OF_TRAINING_USERS, "evaluation", "every_rounds best_by per_user"),
    "evaluation.few_shot_below": Rule(
        "groups test scores by how many training images a class has; not covered, and privacy.json says so"
    ),
    **_each(NOT_OF_TRAINING_USERS, "personal", "num_epochs learning_rate batch_size max_grad_norm"),
    **_each(NOT_OF_TRAINING_USERS, "personal", "train_share min_images split_seed"),
    "privacy": Rule(ONE_KIND, None, (None,)),
    **_each(ACCOUNTED, "privacy", "epsilon delta mechanism clipping clipping_bound quantile clip_step"),
    **_each(ACCOUNTED, "privacy", "indicator_std_fraction accountant sampler band noise"),
    **_each(SIMULATED, "privacy", "noise_cohort_size noise_population"),
    **_each(SEEDED, "privacy", "noise_seed"),
    "privacy.release": Rule("public needs noise_seed=entropy and no simulation, and is refused otherwise"),
    "local_privacy": Rule(ONE_KIND, (None,), None),
    **_each(ACCOUNTED, "local_privacy", "mechanism clipping_bound epsilon delta"),
    **_each(SEEDED, "local_privacy", "noise_seed"),
    **_each(ROUNDING, "runtime", "device engine cpu_kernels lanes fuse threads accumulate"),
    "runtime.precision": Rule("bf16 computes local training; updates, norms, sums and noise stay in float32"),
    "runtime.reduce": _only(
        "bf16 rounds sums after clipping and before noise, which moves them by more than the bound", "exact"
    ),
    **_each(READING, "runtime", "reader_threads prefetch cache_gb"),
    **_each(REPEATED, "runtime", "checkpoint_every checkpoint_minutes keep_checkpoints"),
    "runtime.worker_timeout_s": Rule("ends a job whose workers are stuck; nothing is released"),
    **_each(WATCHING, "runtime", "progress track project entity name artifact"),
}
"""By dotted key. A key that is missing here is refused in every private run."""


def check_privacy(config: TrainingConfig, runtime: Runtime) -> None:
    """Refuse a private run with an option whose value the table does not allow.

    Raises:
        ValueError: one line that names the key, the argument and the values that are allowed.
    """
    section = "privacy" if config.privacy else "local_privacy" if config.local_privacy else None
    if section is None:
        return
    if config.privacy and config.local_privacy:
        raise ValueError(
            "privacy and local_privacy are both set, and no accounting here is for both: set one to none"
        )
    if config.privacy and config.privacy.release == "public" and config.privacy.noise_seed == "run":
        raise ValueError(
            "privacy.release public needs secret noise, and the run's seed is none: set privacy.noise_seed "
            "to entropy"
        )
    for key, value in dotted({**asdict(config), "runtime": asdict(runtime)}).items():
        rule = TABLE.get(key)
        if rule is None:
            raise ValueError(
                f"{section} refuses {key}: nobody has argued in benchmarks/core/config/privacy_matrix.py "
                f"that it keeps the guarantee; set {section} to none"
            )
        if not rule.allows(section, value):
            allowed = rule.central if section == "privacy" else rule.local
            words = " or ".join(_word(v) for v in allowed or ())
            raise ValueError(
                f"{section} refuses {key} = {_word(value)} ({rule.argument}): set {key} to {words}"
            )


def _word(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def markdown() -> str:
    """The table: option, what privacy allows, what local_privacy allows, the argument."""

    def cell(values: Values) -> str:
        return "any" if values is None else ", ".join(_word(v) for v in values)

    lines = ["| option | with `privacy` | with `local_privacy` | argument |", "|---|---|---|---|"]
    lines += [
        f"| `{key}` | {cell(rule.central)} | {cell(rule.local)} | {rule.argument} |"
        for key, rule in TABLE.items()
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Print the table.

    Raises:
        ValueError: for any argument.
    """
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    if argv:
        raise ValueError(f"cannot read the argument {argv[0]!r}: this command takes none")
    print(markdown())


if __name__ == "__main__":
    sys.exit(run_command(main))
