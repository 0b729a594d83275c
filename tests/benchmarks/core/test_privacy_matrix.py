"""The matrix of options against privacy: every option has a row, every cell holds what it says."""

from __future__ import annotations

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
import torch

from benchmarks.core.config.benchmark import AnyRun, Run
from benchmarks.core.config.privacy_matrix import TABLE, main, markdown, rules_for
from benchmarks.core.config.privacy_rules import Rule
from benchmarks.core.config.sections import (
    CompressionSection,
    LocalPrivacySection,
    PrivacySection,
    Runtime,
    TrainingConfig,
)
from benchmarks.core.config.trees import dotted
from benchmarks.core.experiment import build_model
from benchmarks.core.federated import train_federated
from benchmarks.core.recorder import Recorder
from benchmarks.core.run_directory import RunDirectory
from benchmarks.fedcv.detection.config import DETECTION
from benchmarks.fedcv.segmentation.config import SEGMENTATION
from benchmarks.flair.config import FLAIR
from benchmarks.visual_classification.config import VISION
from pfl_ext.aggregation.rule import RULES as RULES_BY_NAME
from pfl_ext.algorithms.algorithm import ALGORITHMS
from pfl_ext.algorithms.optimizers import SERVER_OPTIMIZERS
from pfl_ext.attacks.attack import ATTACKS
from pfl_ext.compression.compressor import COMPRESSORS, FeedbackOptions
from pfl_ext.devices.config import DevicesConfig
from pfl_ext.models.features import Split
from pfl_ext.privacy.central import NoisyMean
from pfl_ext.tasks.multi_label import MultiLabel
from tests.benchmarks.core.numbers_as_features import ViewsOfNumbers, WholeNumbers
from tests.pfl_ext.stores import NumberedStore

SECTIONS = ("privacy", "local_privacy")


def fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Key, type and default of every leaf; a section that may be absent also under its own name."""
    hints = get_type_hints(kind)
    for item in dataclasses.fields(kind):
        hint, key = hints[item.name], prefix + item.name
        parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        inner = [part for part in parts if dataclasses.is_dataclass(part)]
        if inner:
            if len(parts) > 1:
                yield key, hint, None
            yield from fields(inner[0], f"{key}.")
        else:
            yield key, hint, item.default


BY_KEY = {
    key: (hint, default)
    for kind, prefix in ((VISION.kind, ""), (FLAIR.kind, ""), (Runtime, "runtime."))
    for key, hint, default in fields(kind, prefix)
}
RULES = {**rules_for(VISION.kind), **rules_for(FLAIR.kind)}
BY_KEY["server.optimizer"] = (Literal[tuple(SERVER_OPTIMIZERS.names())], "sgd")
BY_KEY["federated.algorithm"] = (Literal[tuple(ALGORITHMS.names())], "fedavg")
BY_KEY["aggregation.kind"] = (Literal[tuple(RULES_BY_NAME.names())], "mean")
BY_KEY["attack.kind"] = (Literal[tuple(ATTACKS.names())], "honest")
BY_KEY["compression.kind"] = (Literal[tuple(COMPRESSORS.names())], "float32")
WITHIN = {key: rule for key, rule in RULES.items() if ".options." in key}
"""Rows of options that the chosen thing declares itself."""

GENOTYPE = " ".join(
    f"{kind}=" + ",".join(["skip_connect@0", "skip_connect@1"] * 4) for kind in ("normal", "reduce")
)
SLOW = {"slow": {"share": 1, "ms_per_sample": 5, "kbps_up": 100, "kbps_down": 100}}
OF_LISTS = {"devices.classes": (SLOW,), "loss.class_weights": ({"food": 2.0},)}
CHECKED = {"model.genotype": (GENOTYPE,), "model.parties": (2, 4), **OF_LISTS}
"""Values of keys that a config checks when it is built."""


def candidates(key: str) -> list[Any]:
    """Every value of a choice; of any other type the default and one more."""
    hint, default = BY_KEY[key]
    if key.endswith(".options"):
        return [None]  # an open mapping, whose keys have no row
    if key in SECTIONS:
        return [None, {"privacy": PrivacySection(2.0), "local_privacy": LocalPrivacySection()}[key]]
    if key == "devices":
        return [None, DevicesConfig(drop_out=0.5)]
    if key in CHECKED:
        return [default, *CHECKED[key]]
    kinds = set(get_args(hint) or (hint,))
    for choice in (hint, *get_args(hint)):
        if get_origin(choice) is Literal:
            return [*get_args(choice), *([None] if type(None) in kinds else [])]
    if bool in kinds:
        return [True, False, *([None] if type(None) in kinds else [])]
    other = {str: "another", int: 3, float: 0.25}
    another = next(other[kind] for kind in (str, int, float) if kind in kinds)
    return [default, another, *(RULES[key].central or ())]


def private(
    section: str, kind: type[TrainingConfig] = FLAIR.kind, bottleneck: int | None = 64
) -> TrainingConfig:
    """A private run's config; its network is such that model.trained may be two_layers or names."""
    federated = dataclasses.replace(kind().federated, weighting="users", cohort_size=3, num_rounds=4)
    sections: dict[str, Any] = {
        "privacy": PrivacySection(epsilon=50, delta=0.01, mechanism="gaussian", clipping_bound=0.02),
        "local_privacy": LocalPrivacySection(epsilon=100, delta=0.01, clipping_bound=0.02),
    }
    model = dataclasses.replace(kind().model, bottleneck=bottleneck, trained_names="*")
    return dataclasses.replace(kind(), model=model, federated=federated, **{section: sections[section]})


def with_value(tree: Any, key: str, value: Any) -> Any:
    """A config with one leaf changed; nothing but types is checked."""
    name, _, rest = key.partition(".")
    return dataclasses.replace(
        tree, **{name: with_value(getattr(tree, name), rest, value) if rest else value}
    )


def without_feedback(kind: str) -> CompressionSection:
    """A section with this kind of compression, without error feedback, which has a row of its own."""
    has_feedback = issubclass(COMPRESSORS[kind].options, FeedbackOptions)
    return CompressionSection(kind=kind, options={"error_feedback": False} if has_feedback else None)


FLAIR_KEYS = {key for key, *_ in fields(FLAIR.kind)}


def run_of(section: str, key: str, value: Any) -> AnyRun:
    name, _, rest = key.partition(".")
    if name == "runtime":
        return Run(private(section), with_value(Runtime(), rest, value))
    if name == "devices" and rest:
        devices = DevicesConfig()
        object.__setattr__(devices, rest, value)  # by itself, without the keys that it needs
        return Run(dataclasses.replace(private(section), devices=devices), Runtime())
    kind = FLAIR.kind if key in FLAIR_KEYS else VISION.kind
    if key == "compression.kind":
        config = dataclasses.replace(private(section, kind), compression=without_feedback(value))
        return Run(config, Runtime())
    one_head = key in ("model.random_features", "model.random_features_width", "model.parties")
    alone = (key, value) == ("model.trained", "head") or one_head
    bottleneck = None if alone else 64
    return Run(with_value(private(section, kind, bottleneck), key, value), Runtime())


def test_every_option_has_a_row_and_every_row_an_option() -> None:
    assert set(RULES) - set(WITHIN) == set(BY_KEY)
    declared = {f"compression.options.{item.name}" for item in dataclasses.fields(FeedbackOptions)}
    assert set(WITHIN) <= declared
    assert all(rule.argument for rule in RULES.values())
    for kind in (FLAIR.kind, VISION.kind, SEGMENTATION.kind, DETECTION.kind):
        assert not set(kind.privacy_rules) & set(TABLE)
    for kind in (FLAIR.kind, VISION.kind):
        assert all(RULES[key] == rule for key, rule in kind.privacy_rules.items()), "one line is printed"


def test_an_option_without_a_row_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.core.config.privacy_matrix.TABLE",
        {k: r for k, r in TABLE.items() if k != "local.momentum"},
    )
    for section in SECTIONS:
        with pytest.raises(ValueError, match=rf"{section} refuses local.momentum: nobody has argued"):
            Run(private(section), Runtime())
    Run(FLAIR.kind(), Runtime())


CELLS = [
    (section, key, value)
    for section in SECTIONS
    for key in BY_KEY
    if not key.startswith(tuple(f"{name}." for name in SECTIONS)) or key.startswith(f"{section}.")
    for value in candidates(key)
    if key != section
]


def refusal(section: str, key: str, value: Any) -> str | None:
    """What a run with this cell is refused with."""
    try:
        run_of(section, key, value)
    except ValueError as fault:
        return str(fault)
    return None


def test_a_benchmark_cannot_allow_what_the_table_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {**FLAIR.kind.privacy_rules, "federated.weighting": Rule("why not")}
    monkeypatch.setattr(FLAIR.kind, "privacy_rules", rules)
    with pytest.raises(ValueError, match=r"privacy refuses federated\.weighting = images"):
        FLAIR.parse(["--config=pfl-r-17", "--federated.weighting=images"])


def test_every_cell_is_allowed_or_refused_as_the_table_says() -> None:
    refused = []
    for section, key, value in CELLS:
        fault = refusal(section, key, value)
        if RULES[key].allows(section, value):  # a section also checks its own values
            assert fault is None or key.startswith(f"{section}."), fault
        else:
            assert fault is not None
            assert f"{section} refuses {key}" in fault or "are both set" in fault
            assert f": set {key} to " in fault or "are both set" in fault
            refused.append(key)
    assert {"federated.reweight", "runtime.reduce", "federated.algorithm", "mode"} <= set(refused)


DIFFERENT = ("data.val_share",)


def test_the_printed_table_has_a_line_for_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert set(markdown({k: r for k, r in RULES.items() if k not in DIFFERENT}).splitlines()) <= set(lines)
    assert all(line.count("|") == 5 for line in lines)
    both = [line for line in lines if any(f"`{key} of" in line for key in DIFFERENT)]
    assert [line.split(" | ")[:2] for line in sorted(both)] == [
        ["| `data.val_share of fedcv.detection`", "0.0"],
        ["| `data.val_share of fedcv.segmentation`", "0.0"],
        ["| `data.val_share of visual_classification`", "any"],
    ], "which benchmarks treat differently"
    (line,) = [line for line in lines if "`federated.reweight`" in line]
    assert line.startswith("| `federated.reweight` | none | none | FedIR's weights hold")


BOUND, SIZES = 0.02, (4, 7, 3, 6, 8)
SMALL = (
    "--seed=1",
    "--model.arch=cifar_cnn",
    "--model.input_size=8",
    "--data.image_size=8",
    "--local.batch_size=4",
    "--federated.cohort_size=4",
    "--federated.num_rounds=1",
    "--federated.weighting=users",
    "--evaluation.best_by=last",
    "--runtime.progress=false",
)
CENTRAL = (
    *SMALL,
    "--privacy.epsilon=100",
    "--privacy.delta=0.05",
    f"--privacy.clipping_bound={BOUND}",
    "--privacy.mechanism=gaussian",
)


class Released(Exception):
    """The first round's sum is there: what the run would do after it is not looked at."""


def released_sum(argv: tuple[str, ...], sizes: tuple[int, ...], directory: Path) -> torch.Tensor:
    """The noisy sum of the first round that a private run makes, as one vector, by the production path.

    Its noise and its cohort are those of the seed, whatever users have how many images.
    """
    run = FLAIR.parse(argv)
    views = run.config.augment.views is not None
    store, val = (
        (ViewsOfNumbers(sizes), WholeNumbers([2, 2]))
        if views
        else (NumberedStore(sizes), NumberedStore([2, 2]))
    )
    sums: list[torch.Tensor] = []
    real = NoisyMean.postprocess_server

    def watched(self: NoisyMean, **given: Any) -> Any:
        stats, _ = real(self, **given)
        flat = torch.cat([stats[name].double().reshape(-1) for name in sorted(stats)])
        sums.append(flat.clone())
        raise Released

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NoisyMean, "postprocess_server", watched)
        module = build_model(run.config, 5, None, MultiLabel())
        module = Split(module).classifier if views else module
        files = RunDirectory(run, directory)
        files.begin()
        with contextlib.suppress(Released):
            train_federated(run, store, val, module, Recorder(files))
    return sums[0]


def moved(argv: tuple[str, ...], folder: Path) -> tuple[float, float]:
    """How far the sum moves when the last user's images are gone, and how far rounding alone may move it."""
    whole = released_sum(argv, SIZES, folder / "whole")
    less = released_sum(argv, (*SIZES[:-1], 0), folder / "less")
    return float((whole - less).norm()), float(2**-22 * whole.norm())


TRAINING = (
    *("local.", "augment.", "federated.", "compression.", "aggregation.", "privacy.", "runtime."),
    *("model.dropout", "model.trained", "model.lora_trained"),
)
NOT_OF_THE_SUM = (
    *("privacy.accountant", "privacy.noise", "privacy.release"),
    *("runtime.track", "runtime.artifact", "runtime.progress", "runtime.keep_checkpoints"),
)
CHOICES = [
    (key, value)
    for key, (hint, _) in BY_KEY.items()
    if key.startswith(TRAINING) and not key.startswith(NOT_OF_THE_SUM)
    if get_origin(hint) is Literal or bool in (get_args(hint) or (hint,))
    for value in candidates(key)
    if value is not None and RULES[key].allows("privacy", value)
]
ONCE = ("--model.trained=head", "--federated.cohort_size=5")
BIASED = [name for name in COMPRESSORS.names() if issubclass(COMPRESSORS[name].options, FeedbackOptions)]
BESIDE: dict[tuple[str, Any], tuple[str, ...]] = {
    ("federated.algorithm", "fedncm"): ONCE,
    ("federated.algorithm", "fed3r"): ONCE,
    **{("compression.kind", kind): ("--compression.options.error_feedback=false",) for kind in BIASED},
    ("privacy.sampler", "fixed"): ("--federated.cohort_size=5",),
    ("privacy.sampler", "cyclic"): ("--federated.cohort_size=5",),
    ("augment.padding", "reflect"): ("--augment.crop=padded",),
    ("augment.noise_by_user", True): ("--augment.noise=0.1",),
    ("local.schedule", "exponential"): ("--local.schedule_factor=0.5",),
    ("local.schedule", "cyclic"): ("--local.schedule_cycle=2", "--local.final_learning_rate=0.001"),
    ("model.trained", "two_layers"): ("--model.bottleneck=4",),
    ("model.trained", "norms"): ("--model.arch=resnet18",),
    **{("model.lora_trained", kind): ("--model.trained=lora",) for kind in ("both", "b")},
    ("model.trained", "names"): ("--model.trained_names=*weight",),
    ("model.dropout", True): ("--model.arch=simple_cnn",),
    ("runtime.cache_features", False): ("--model.trained=head",),
}
"""What a choice cannot do without."""
PLAIN = FLAIR.parse(CENTRAL)
CHOSEN = dotted(dataclasses.asdict(PLAIN.config) | {"runtime": dataclasses.asdict(PLAIN.runtime)})
USUAL = [choice for choice in CHOICES if choice not in BESIDE and CHOSEN.get(choice[0]) == choice[1]]
"""What `CENTRAL` has anyway: each of these is the same run, so that one is made."""


@pytest.mark.parametrize("key, value", [USUAL[0], *(c for c in CHOICES if c not in USUAL)], ids=str)
def test_no_allowed_choice_lets_one_user_move_the_sum_by_more_than_the_bound(
    key: str, value: Any, tmp_path: Path
) -> None:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    beside = BESIDE.get((key, value), ())
    given = [w for w in CENTRAL if beside is not ONCE or "weighting" not in w]  # which it does not read
    distance, rounding = moved((*given, *beside, f"--{key}={text}"), tmp_path)
    bound = 2 * BOUND if value == "fixed" else BOUND  # replaced, not removed
    assert 0.9 * BOUND < distance <= bound * (1 + 1e-5) + rounding


@pytest.mark.parametrize("epochs", [1, 4])
def test_views_of_a_users_images_move_the_sum_by_no_more_than_the_bound(epochs: int, tmp_path: Path) -> None:
    """In four epochs a user brings several views of an image, in one update."""
    words = ("--model.trained=head", "--augment.flip=both", "--augment.views=3")
    distance, rounding = moved((*CENTRAL, *words, f"--local.num_epochs={epochs}"), tmp_path)
    assert 0.9 * BOUND < distance <= BOUND * (1 + 1e-5) + rounding


def test_fedirs_weights_would_let_a_user_outside_the_cohort_move_the_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why it is refused: without it such a user moves nothing."""
    argv = (*CENTRAL, "--seed=9", "--federated.cohort_size=2")
    assert moved(argv, tmp_path / "none")[0] == 0
    with pytest.raises(ValueError, match=r"privacy refuses federated.reweight = fedir \("):
        FLAIR.parse((*argv, "--federated.reweight=fedir"))
    monkeypatch.setattr("benchmarks.core.config.benchmark.check_privacy", lambda *_: None)
    assert moved((*argv, "--federated.reweight=fedir"), tmp_path / "fedir")[0] > 1e-3 * BOUND


def test_a_sum_in_bf16_would_move_by_more_than_the_bound() -> None:
    """Why it is refused: 200 clipped updates of C, and one more."""
    with pytest.raises(ValueError, match=r"privacy refuses runtime.reduce = bf16 \("):
        FLAIR.parse((*CENTRAL, "--runtime.reduce=bf16"))
    updates = torch.randn(201, 1000, generator=torch.Generator().manual_seed(1)).abs()
    updates /= updates.norm(dim=1, keepdim=True)
    with_user, without = (updates[:n].sum(0).bfloat16().float() for n in (201, 200))
    assert (with_user - without).norm() > 1.05
