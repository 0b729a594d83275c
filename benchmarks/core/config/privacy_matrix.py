"""Which values of which option go with privacy, and why: one table, checked for every run.

    python -m benchmarks.core.config.privacy_matrix          the table, as Markdown

Privacy is refused by default: a private run may use an option only if this table, or for a key of its own the
benchmark's ``privacy_rules``, has a row that allows the value, with the argument why one user's influence on
what is released stays what was accounted for. The quantity that must stay bounded is the clipped sum of a
round: without one user it may change by the clipping bound C at most, and nothing else that the run releases
or learns from may depend on that user. What the guarantee does not cover although it is written (scores,
times, counts) is listed in ``privacy.json``.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import get_args

from benchmarks.core.config.effects import reason_for
from benchmarks.core.config.privacy_rules import (
    NOT_OF_TRAINING_USERS,
    OF_THE_DATA,
    PRIVACY,
    Rule,
    Values,
    each,
    only,
)
from benchmarks.core.config.sections import Runtime, TrainingConfig, config_modules
from benchmarks.core.config.trees import as_word, dotted
from benchmarks.reporting.tables import markdown_table
from dataset.cli import run as run_command
from dataset.files import imported
from pfl_ext.aggregation.rule import MEAN
from pfl_ext.algorithms.algorithm import ALGORITHMS
from pfl_ext.attacks.attack import HONEST
from pfl_ext.compression.compressor import PLAIN
from pfl_ext.data.normalisation import Normalisation

OF_THE_NETWORK = "fixed before training, and looks at no training image"
BEFORE_CLIPPING = "acts on one user's images and update, before that update is clipped"
AFTER_NOISE = "works on the noisy mean alone: post-processing"
UNUSED = "not read in federated training"
ACCOUNTED = "is what the accountant computes with"
ONE_KIND = "no accounting here is for both kinds of privacy at once"
SIMULATED = "the noise of another system; the run's own epsilon is computed and reported beside it"
SEEDED = "entropy is secret; run is public, for research only, and said wherever epsilon is"
ROUNDING = "changes the sum by rounding in float32 at most"
READING = "how images are read, not which"
REPEATED = "checkpoints hold what was released; a round made again has the same noise: benchmarks.core.secret"
WATCHING = "where lines and files go; what of them is covered, privacy.json says"

MAPPINGS = ("options", "classes", "class_weights")
"""Last parts of the keys whose values have keys of their own."""


@dataclass(frozen=True)
class ArguedAlgorithms(Rule):
    """The algorithms that do not refuse privacy: their files argue how much one user can change."""

    def allowed(self, section: str) -> Values:
        """Their names."""
        return tuple(name for name in ALGORITHMS.names() if "privacy" not in ALGORITHMS[name].refusals)


TABLE: Mapping[str, Rule] = {
    "setting": Rule("a name"),
    "own_code": Rule("says which files are those that other keys name; each of these has its own row"),
    "mode": only("centralised training has no user updates to clip", "federated"),
    "seed": Rule("decides initialisation, crops and the order of images; with noise_seed=entropy no noise"),
    **each(OF_THE_DATA, "data", "image_size"),
    **each(OF_THE_NETWORK, "model", "arch input_size groups bottleneck init cells cell_channels parties"),
    **each(OF_THE_NETWORK, "model", "norm trained last_blocks lora_rank lora_alpha lora_trained"),
    **each(
        "names parameters or layers before training, and looks at no training image; what is not named is in "
        "no update",
        "model",
        "trained_names lora_targets",
    ),
    **each(
        "drawn from the seed before training, and looks at no training image",
        "model",
        "random_features random_features_width",
    ),
    "model.genotype": only(
        "an architecture may have been searched for on the same users' images, without any noise", None
    ),
    "model.keep_head": only(
        "a head with these labels may come from the same users, without any noise: take a new one", False
    ),
    "model.weights_sha256": Rule("names the file that model.pretrained is about"),
    "model.pretrained": Rule("the weights' own training data is not covered, and privacy.json says so"),
    "model.channel_norm": Rule(
        "group looks at one image; data needs two sums over all users, which only privacy.moments_multiplier "
        "clips, noises and counts",
        None,
        ("group",),
    ),
    "model.normalisation": only(
        "the mean and deviation of all training images are no sum that is clipped and noised",
        *(name for name in get_args(Normalisation) if name != "data"),
    ),
    **each(BEFORE_CLIPPING, "model", "dropout feature_format"),
    **each(BEFORE_CLIPPING, "augment", "crop flip padding label_smoothing"),
    **each(
        "an image changes by its own key and pixels alone, before its user's update is clipped",
        "augment",
        "rand_augment color_jitter noise cutout random_erasing",
    ),
    "augment.noise_by_user": Rule(
        "a user's share of the noise follows from its place and the number of places alone; a user that is "
        "removed leaves its place empty"
    ),
    **each(
        "images are mixed only within a batch of one user, before the user's update is clipped",
        "augment",
        "mixup cutmix",
    ),
    **each(BEFORE_CLIPPING, "loss", "focal_gamma absent_gamma absent_margin dice"),
    "loss.class_weights": only(
        "they may have been counted on the same users' labels, without any noise", None
    ),
    "augment.views": Rule(
        "which views an image has, and which a step takes, follows from the seed and the image's and its "
        "user's place; the user's update is clipped as one, however many views its images have"
    ),
    **each(
        BEFORE_CLIPPING,
        "local",
        "learning_rate effective_learning_rate head_rate_factor layer_decay num_epochs batch_size",
    ),
    **each(
        "a function of the round: it decides how a user's update comes about, before that is clipped",
        "local",
        "schedule final_learning_rate schedule_power schedule_factor schedule_cycle schedule_from",
    ),
    **each(BEFORE_CLIPPING, "local", "max_images cap straddle shuffle reshuffle"),
    **each(
        BEFORE_CLIPPING,
        "local",
        "max_grad_norm clip_by optimizer momentum beta1 beta2 epsilon weight_decay virtual_size",
    ),
    **each(
        AFTER_NOISE,
        "server",
        "optimizer learning_rate head_rate_factor beta1 beta2 epsilon adam_form momentum",
    ),
    **each(AFTER_NOISE, "server", "schedule warmup_rounds final_learning_rate options"),
    **each(AFTER_NOISE, "server", "schedule_power schedule_factor schedule_cycle schedule_from"),
    "federated.algorithm": ArguedAlgorithms(
        "fedavg, fedprox and fedsam send one update a user, which is clipped; fedncm and fed3r one vector of "
        "sums, which is clipped, and once; fednova scales updates by their steps after that, and scaffold "
        "keeps and sends control variates that no clipping bounds; of any other "
        "its own file argues, or it is refused"
    ),
    **each(ACCOUNTED, "federated", "num_rounds cohort_size"),
    "federated.replacement": only("a user drawn twice in a round would add two updates to the sum", False),
    "federated.sampling": only(
        "the accounting is for users who are all drawn alike; a probability that grows with a user's images "
        "also depends on the others' number of images",
        "uniform",
    ),
    "federated.reweight": only(
        "FedIR's weights hold the label counts of all training images, exactly, and enter every user's loss",
        "none",
    ),
    "federated.max_importance": Rule("caps FedIR's weights, which are refused"),
    "federated.weighting": only(
        "a weight by images multiplies the clipped update, and the sum of the weights is not private", "users"
    ),
    "federated.mu": Rule(BEFORE_CLIPPING),
    "federated.scaffold_option": only("read for scaffold alone, which is refused", None),
    "federated.scaffold_correction": only("read for scaffold alone, which is refused", None),
    "federated.options": Rule("read by the algorithm alone, whose file argues for it"),
    "federated.max_state_gb": Rule("read for scaffold alone, which is refused"),
    "devices": Rule("none: every user that is drawn takes part"),
    "devices.drop_out": Rule(
        "a coin of each user and round, whatever its data: its part in a sum is its clipped update or none, "
        "and how others are drawn and what the sum is divided by stay as they are"
    ),
    **each("decides when a round ends, and with late=wait nothing else", "devices", "classes sigma"),
    **each("decides when a round ends, and with late=wait nothing else", "devices", "capacities"),
    **each("names a file that these keys are about", "devices", "capacities_sha256 availability_sha256"),
    "devices.late": only("whether a user is late depends on its images", "wait"),
    "devices.deadline_s": only("whether a user keeps it depends on its images", None),
    "devices.over_selection": only("who is kept depends on the others' numbers of images", 1.0),
    "devices.stragglers": only("who is one depends on who else is in the cohort", 0.0),
    **{
        f"devices.{key}": only("who is on depends on the time, and so on others' numbers of images", None)
        for key in ("availability", "availability_period_s")
    },
    "compression.kind": Rule(
        "an update is compressed before it is clipped, so that a user moves the sum by the bound at most, "
        "and what adaptive clipping measures is compressed; local noise makes every message dense, so that "
        "no bytes would be saved",
        None,
        (PLAIN,),
    ),
    "aggregation.kind": only(
        "a user's own update is scaled before it is clipped; every other rule chooses among updates, so that "
        "one user can move its result by more than the bound",
        MEAN,
        "norm_bound",
    ),
    "aggregation.options": Rule("read by the rule alone: of norm_bound, the bound of a user's own update"),
    "attack.kind": only("simulated attackers may look at the updates of all others", HONEST),
    **each("read by attackers alone, which are refused", "attack", "share options"),
    "compression.options": Rule("read by the compressor alone, before clipping"),
    "compression.options.error_feedback": only(
        "what a message left out outlives the round, and so would what it tells of the user", False, None
    ),
    **each(
        UNUSED,
        "centralised",
        "num_epochs batch_size optimizer learning_rate head_rate_factor beta1 beta2 epsilon",
    ),
    **each(UNUSED, "centralised", "momentum weight_decay max_grad_norm layer_decay"),
    **each(
        UNUSED,
        "centralised",
        "schedule final_learning_rate schedule_power schedule_factor schedule_cycle schedule_from",
    ),
    **each(UNUSED, "centralised", "warmup_epochs warmup_learning_rate"),
    **each(UNUSED, "evaluation", "every_epochs"),
    **each(NOT_OF_TRAINING_USERS, "evaluation", "every_rounds best_by"),
    **each(
        "a function of the models after each round, which are counted as released: post-processing",
        "evaluation",
        "average average_decay average_from_round average_every",
    ),
    "privacy": Rule(ONE_KIND, None, (None,)),
    **each(ACCOUNTED, "privacy", "epsilon delta mechanism clipping clipping_bound quantile clip_step"),
    **each(ACCOUNTED, "privacy", "indicator_std_fraction accountant sampler band noise"),
    **each(ACCOUNTED, "privacy", "moments_multiplier mean_bound square_bound"),
    **each(SIMULATED, "privacy", "noise_cohort_size noise_population"),
    **each(SEEDED, "privacy", "noise_seed"),
    "privacy.release": Rule("public needs noise_seed=entropy and no simulation, and is refused otherwise"),
    "local_privacy": Rule(ONE_KIND, (None,), None),
    **each(ACCOUNTED, "local_privacy", "mechanism clipping_bound epsilon delta"),
    **each(SEEDED, "local_privacy", "noise_seed"),
    **each(ROUNDING, "runtime", "device engine cpu_kernels lanes fuse threads accumulate deterministic"),
    "runtime.check_engine": Rule(
        "trains users twice and keeps neither; a private run says only that it held"
    ),
    "runtime.tune": only("how long users' images take would show in what is chosen", None, False),
    "runtime.precision": Rule("bf16 computes local training; updates, norms, sums and noise stay in float32"),
    "runtime.reduce": only(
        "bf16 rounds sums after clipping and before noise, which moves them by more than the bound", "exact"
    ),
    **each(READING, "runtime", "reader_threads prefetch cache_gb cache_features"),
    **each(REPEATED, "runtime", "checkpoint_every checkpoint_minutes keep_checkpoints"),
    "runtime.worker_timeout_s": Rule("ends a job whose workers are stuck; nothing is released"),
    **each(WATCHING, "runtime", "progress track project entity name artifact"),
}
"""The rules of the options that every benchmark has, by dotted key."""


def rules_for(kind: type[TrainingConfig]) -> Mapping[str, Rule]:
    """The rules by dotted key, those of the benchmark's own keys among them.

    A key without a rule is refused in every private run. The rule of an option that every benchmark has is
    the one of `TABLE`.
    """
    return {**kind.privacy_rules, **TABLE}


def _declared(key: str) -> str:
    """The key of a type of config that holds a dotted key, which may be one within a mapping."""
    for name in MAPPINGS:
        head, within, _ = key.partition(f".{name}.")
        if within:
            return f"{head}.{name}"
    return key


def check_privacy(config: TrainingConfig, runtime: Runtime) -> None:
    """Refuse a private run with an option whose value the table does not allow.

    A key that the algorithm does not read may stand at its default, whatever that is.

    Raises:
        ValueError: one line that names the key, the argument and the values that are allowed.
    """
    section = "privacy" if config.privacy else "local_privacy" if config.local_privacy else None
    if section is None:
        return
    if config.privacy and config.local_privacy:
        raise ValueError(
            "privacy and local_privacy are both set, but they cannot be combined: set one of them to none"
        )
    if config.privacy and config.privacy.release == "public" and config.privacy.noise_seed == "run":
        raise ValueError(
            "privacy.release public needs secret noise, but this noise is drawn from the run's seed: "
            "set privacy.noise_seed to entropy"
        )
    rules = rules_for(type(config))
    unread = dict.fromkeys(config.federated.chosen.idle.split(), "")
    for key, value in dotted({**asdict(config), "runtime": asdict(runtime)}).items():
        row = key if key in rules else _declared(key)
        rule = rules.get(row)
        if rule is None:
            raise ValueError(
                f"{section} refuses {key}: nobody has argued in benchmarks/core/config/privacy_matrix.py "
                f"or in the benchmark's privacy_rules that it keeps the guarantee; set {section} to none"
            )
        if not rule.allows(section, value) and reason_for(key, unread) is None:
            words = " or ".join(as_word(v) for v in rule.allowed(section) or ())
            raise ValueError(
                f"{section} refuses {key} = {as_word(value)} ({rule.argument}): set {row} to {words}"
            )
    if config.privacy and config.federated.chosen.once:
        cohort, population = config.privacy.noise_cohort_size, config.privacy.noise_population
        if cohort != population:
            raise ValueError(
                f"privacy.noise_cohort_size is {as_word(cohort)} and privacy.noise_population is "
                f"{as_word(population)}, but with {config.federated.algorithm} every user takes part in "
                "the only round: set both to none, or both to the users of the simulated system"
            )


def markdown(rules: Mapping[str, Rule]) -> str:
    """The table: option, what privacy allows, what local_privacy allows, the argument."""

    def values(rule: Rule, section: str) -> str:
        allowed = rule.allowed(section)
        return "any" if allowed is None else ", ".join(map(as_word, allowed))

    return markdown_table(
        ["option", *(f"with `{section}`" for section in PRIVACY), "argument"],
        [[f"`{key}`", *(values(rule, s) for s in PRIVACY), rule.argument] for key, rule in rules.items()],
    )


def main(argv: Sequence[str]) -> None:
    """Print the table, with the options of every benchmark.

    Raises:
        ValueError: for any argument.
    """
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    if argv:
        raise ValueError(f"cannot read the argument {argv[0]!r}: this command takes no arguments")
    for name in config_modules():
        imported(name)
    print(markdown(rules_of_all(TrainingConfig.__subclasses__())))


def rules_of_all(kinds: Sequence[type[TrainingConfig]]) -> dict[str, Rule]:
    """The rules by option; of options that benchmarks treat differently, by option and benchmark."""
    rules, by_key = dict(TABLE), defaultdict[str, dict[str, Rule]](dict)
    for kind in kinds:
        benchmark = kind.__module__.removeprefix("benchmarks.").removesuffix(".config")
        for key, rule in kind.privacy_rules.items():
            by_key[key][benchmark] = rule
    for key, by_benchmark in by_key.items():
        alike = all(rule == next(iter(by_benchmark.values())) for rule in by_benchmark.values())
        rules |= {key if alike else f"{key} of {benchmark}": rule for benchmark, rule in by_benchmark.items()}
    return rules


if __name__ == "__main__":
    sys.exit(run_command(main))
