from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import yaml

from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.config.digests import config_tree, digest
from benchmarks.core.config.sections import Runtime, TrainingConfig
from benchmarks.core.config.trees import leaves, section_in
from benchmarks.core.experiment import build_model
from benchmarks.fedcv.detection.config import DETECTION
from benchmarks.fedcv.segmentation.config import SEGMENTATION
from benchmarks.flair import paper
from benchmarks.flair.config import FLAIR, RECIPES, Config, parse
from benchmarks.visual_classification.config import VISION
from pfl_ext.tasks.multi_label import MultiLabel

SHIPPED = FLAIR.settings


def config(*argv: str) -> Config:
    return parse(argv).config


def test_every_setting_of_table_1_has_a_config_and_every_config_a_setting() -> None:
    assert {name.upper() for name in SHIPPED} == set(paper.settings())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_says_what_the_paper_says(name: str) -> None:
    mode, init, labels = name.split("-")
    made = config("--config", name)
    assert made.setting == name.upper()
    assert made.mode == ("centralised" if mode == "c" else "federated")
    assert made.data.taxonomy == ("labels" if labels == "17" else "fine_grained_labels")
    assert made.model.pretrained == (init == "f")
    if mode == "c":
        assert (made.centralised.num_epochs, made.centralised.learning_rate, made.centralised.batch_size) == (
            (50, 1e-4, 512) if init == "f" else (100, 5e-4, 512)
        )
    else:
        # Predecessors 8: scratch runs at the fine-tuning rate, because one config serves both.
        assert made.local.learning_rate == (0.01 if init == "f" else 0.1)
        assert (made.federated.num_rounds, made.federated.cohort_size) == (5000, 200)
        assert made.server.learning_rate == (0.02 if mode == "pfl" else 0.1)
        assert (made.privacy is not None) == (mode == "pfl")
        assert (made.local.num_epochs, made.local.batch_size, made.local.max_images) == (2, 16, 512)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_opens_with_what_a_reader_must_know(name: str) -> None:
    head = FLAIR.path(name).read_text().split("\nsetting:")[0]
    assert all(
        word in head for word in (name.upper(), "FLAIR", "Command:", "Expected:", "Time:", "Deviates:")
    )
    row = paper.row(name.upper())
    assert row is not None
    assert f"C-AP {row['C-AP']:g}" in head


def test_the_command_line_beats_the_yaml_which_beats_the_defaults(tmp_path: Path) -> None:
    """Predecessors 14: YAML beats the command line, so every run of a sweep is the same run."""
    path = tmp_path / "mine.yaml"
    path.write_text("federated:\n  mu: 0.01\n  algorithm: fedprox\n  cohort_size: 7\n")
    assert config("--config", str(path)).federated.mu == 0.01
    assert config("--config", str(path)).federated.num_rounds == FLAIR.default_config.federated.num_rounds
    for form in (["--federated.mu=5"], ["--federated.mu", "5"]):
        made = config("--config", str(path), *form)
        assert made.federated.mu == 5.0
        assert made.federated.cohort_size == 7


def test_none_is_nothing_where_a_field_may_be_empty_and_a_word_where_it_is_a_choice() -> None:
    assert config("--local.max_images=none").local.max_images is None
    assert config("--augment.flip=none").augment.flip == "none"


def test_the_argv_that_a_wandb_agent_sends_is_taken_whole() -> None:
    """``${args}`` expands to --key=value for each parameter, numbers and booleans as Python prints them."""
    sent = [
        "--federated.cohort_size=50",
        "--local.learning_rate=0.03162277660168379",
        "--local.straddle=False",
        "--seed=3",
        "--server.learning_rate=1e-05",
        "--server.optimizer=yogi",
    ]
    made = config("--config", "fl-f-17", *sent)
    assert made.federated.cohort_size == 50
    assert made.local.learning_rate == 0.03162277660168379
    assert made.local.straddle is False
    assert made.seed == 3
    assert made.server.learning_rate == 1e-05
    assert made.server.optimizer == "yogi"


def test_every_field_can_be_set_from_the_command_line_as_text() -> None:
    """Each default, written as text, comes back as itself; so no field is out of a sweep's reach."""

    def values(node: object, prefix: str = "") -> dict[str, object]:
        out: dict[str, object] = {}
        for item in dataclasses.fields(node):  # type: ignore[arg-type]
            value = getattr(node, item.name)
            out |= (
                values(value, f"{prefix}{item.name}.")
                if dataclasses.is_dataclass(value)
                else {prefix + item.name: value}
            )
        return out

    text = FLAIR.help("", "train")
    for key, value in values(FLAIR.default_config).items():
        made = values(config(f"--{key}={value}"))
        assert made[key] == value, key
        assert type(made[key]) is type(value), key
        assert f"--{key} " in text
    for key, value in values(Runtime(), "runtime.").items():
        assert values(parse([f"--{key}={value}"]).runtime, "runtime.")[key] == value


@pytest.mark.parametrize(
    "benchmark", [FLAIR, VISION, SEGMENTATION, DETECTION], ids=["flair", "vision", "masks", "boxes"]
)
def test_every_field_has_a_description_of_one_line_which_help_shows(
    benchmark: Benchmark[TrainingConfig],
) -> None:
    text = " ".join(benchmark.help("", "train").split())
    leaf_keys = [leaf.key for leaf in (*leaves(benchmark.kind), *leaves(Runtime, "runtime."))]
    for key in leaf_keys:
        *sections, name = key.split(".")
        kind: Any = Runtime if sections[:1] == ["runtime"] else benchmark.kind
        for section in sections[kind is Runtime :]:
            kind = section_in(get_type_hints(kind)[section])
        described = kind.__pydantic_fields__[name].description
        assert described, key
        assert described.endswith("."), key
        assert "\n" not in described, key
        assert f"--{key} " in text, key
        assert described in text, key


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["--local.learnin_rate=1"],
            "there is no config key local.learnin_rate; did you mean local.learning_rate?",
        ),
        (["--bogus=1"], "there is no config key bogus"),
        (["--local.learning_rate=fast"], "local.learning_rate is 'fast': input should be a valid number"),
        (["--local.batch_size=2.5"], "local.batch_size is '2.5'"),
        (["--local.batch_size=0"], "local.batch_size is '0': input should be greater than 0"),
        (["--server.optimizer=adm"], "server.optimizer is 'adm': choose one of adagrad, adam, sgd, yogi"),
        (["--local=3"], "local is '3', but has keys of its own: give local.KEY=VALUE"),
        (
            ["--loss.class_weights=3"],
            "class_weights is '3', but has keys of its own: give loss.class",
        ),
        (["--local=3", "--local.batch_size=3"], "--local has already been given a value"),
        (["--seed=-1"], "seed is '-1'"),
        (["--server.learning_rate=nan"], "server.learning_rate is 'nan'"),
        (["--config=nowhere.yaml"], "--config nowhere.yaml: no such file, and not the name of a config of"),
        (["--recipe=pfll"], "recipe is 'pfll': choose one of paper, pfl"),
        (["--scale=huge"], "scale is 'huge'"),
        (["--resume=maybe"], "--resume is 'maybe'"),
        (["stray"], "cannot read the argument 'stray'"),
        (["--seed"], "--seed needs a value"),
        (["--data.image_size=100"], "model.input_size is 224, but must be at most data.image_size = 100"),
        (["--runtime.precision=fp8"], "runtime.precision|precision is 'fp8'"),
        (["--federated.algorithm=scaffold", "--federated.replacement=true"], "set federated.replacement to"),
        (
            ["--federated.algorithm=scaffold", "--federated.sampling=proportional"],
            "set federated.sampling to",
        ),
        (
            ["--federated.scaffold_option=I"],
            "has no effect where federated.algorithm is fedavg: remove it, or choose scaffold",
        ),
        (["--federated.scaffold_correction=step"], "--federated.scaffold_correction has no effect where"),
        (["--federated.algorithm=scaffold", "--federated.scaffold_option=3"], "scaffold_option is '3'"),
        (
            ["--config=pfl-r-17", "--federated.algorithm=scaffold"],
            "privacy refuses federated.algorithm = scaff",
        ),
        (["--recipe=pfl", "--federated.num_rounds=20"], "server.warmup_rounds is 30"),
        (["--runtime.cache_gb=1e308"], "cache_gb is '1e308': input should be less than or equal to 1000000"),
        (
            ["--runtime.threads=100000"],
            "runtime.threads is '100000': input should be less than or equal to 1024",
        ),
        (["--runtime.lanes=100000"], "runtime.lanes is '100000': input should be less than or equal to 1024"),
        (["--server.beta1=1"], "server.beta1 is '1': input should be less than 1"),
    ],
)
def test_a_mistake_is_named_with_its_mend(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse(argv)
    assert any(part in str(caught.value) for part in message.split("|"))


@pytest.mark.parametrize(
    "text, message",
    [
        ("seed: [1", "is not valid YAML:"),
        ("- a\n- b", "must hold a mapping"),
        ("seed: 1\nseed: 2", "is there twice"),
        ("federatd:\n  mu: 1", "did you mean federated?"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML:"),
        ("local: 3", "local is 3"),
        ("seed: true", "seed is true: give a number"),
        ("local:\n  momentum: false", "local.momentum is false: give a number"),
        ("privacy:\n  delta: true", "privacy.delta is true: give a number"),
        ("loss:\n  class_weights: {food: true}", "loss.class_weights.food is true: give a number"),
        ("\x00", "is not valid YAML:"),
    ],
)
def test_a_bad_yaml_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="(?s)" + message.replace("?", r"\?")):
        parse(["--config", str(path)])


def test_a_recipe_is_its_switches_and_explicit_keys_beat_it(tmp_path: Path) -> None:
    made = config("--recipe", "pfl")
    for section, switches in RECIPES["pfl"].items():
        for key, value in switches.items():
            assert getattr(getattr(made, section), key) == value
            assert getattr(getattr(FLAIR.default_config, section), key) != value
    assert config("--recipe=pfl", "--server.beta2=0.95").server.beta2 == 0.95
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: pfl\nserver:\n  beta2: 0.9\n")
    assert config("--config", str(path)).server.beta2 == 0.9
    assert config("--config", str(path)).server.adam_form == "torch"
    assert config("--config", str(path), "--recipe=pfl").server.beta2 == 0.99


@pytest.mark.parametrize("name", SHIPPED)
def test_the_mini_scale_changes_size_and_not_the_task(name: str) -> None:
    full, mini = config("--config", name), config("--config", name, "--scale", "mini")
    assert (mini.data.taxonomy, mini.model.pretrained, mini.mode) == (
        full.data.taxonomy,
        full.model.pretrained,
        full.mode,
    )
    if full.mode == "federated":
        assert mini.federated.num_rounds < full.federated.num_rounds
        assert mini.centralised == full.centralised
    else:
        assert mini.centralised.num_epochs < full.centralised.num_epochs
        assert mini.federated == full.federated


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: &a [x, x]\nb: &b [*a, *a]\n", "aliases are not allowed"),
        ("seed: " + "[" * 50_000, "is not valid YAML:"),
        ("seed: 2001-99-99", "is not valid YAML:"),
        ("seed: !!python/object/apply:os.system [id]", "is not valid YAML:"),
        ("seed: \x00", "is not valid YAML:"),
        ("seed: " + "9" * 5_000, "is not valid YAML:"),
        ("? [a, b]\n: 1\n", "is not valid YAML:"),
        ("1: 2\n", "1"),
        ("- 1\n", "must hold a mapping"),
    ],
    ids=["aliases", "nesting", "date", "python", "nul", "digits", "key", "number", "list"],
)
def test_hostile_yaml_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        parse([f"--config={path}"])
    assert "c.yaml" in str(caught.value)


IDLE = [
    (FLAIR, ["--federated.mu=0.1"], "--federated.mu has no effect where federated.algorithm is fedavg"),
    (FLAIR, ["--centralised.num_epochs=3"], "--centralised.num_epochs has no effect where mode is federated"),
    (FLAIR, ["--config=c-r-17", "--federated.num_rounds=3"], "has no effect where mode is centralised"),
    (FLAIR, ["--config=c-r-17", "--data.partition=iid"], "has no effect where mode is centralised"),
    (FLAIR, ["--personal.learning_rate=0.1"], "has no effect where personal.num_epochs is 0"),
    (FLAIR, ["--server.momentum=0.9"], "where server.optimizer is adam: remove it, or choose sgd"),
    (FLAIR, ["--server.optimizer=sgd", "--server.beta1=0.5"], "has no effect where server.optimizer is sgd"),
    (FLAIR, ["--server.warmup_rounds=3"], "has no effect where server.schedule is constant"),
    (FLAIR, ["--federated.max_importance=3"], "has no effect where federated.reweight is none"),
    (FLAIR, ["--federated.max_state_gb=3"], "has no effect where federated.algorithm is fedavg"),
    (FLAIR, ["--local.max_images=none", "--local.cap=first"], "has no effect where local.max_images is none"),
    (FLAIR, ["--local.max_grad_norm=none", "--local.clip_by=global"], "where local.max_grad_norm is none"),
    (FLAIR, ["--config=fl-f-17", "--model.groups=8"], "has no effect where model.pretrained is true"),
    (FLAIR, ["--model.weights_sha256=ab"], "has no effect where model.pretrained is false"),
    (FLAIR, ["--model.norm=group"], "model.norm has no effect where model.pretrained is false"),
    (
        FLAIR,
        ["--config=pfl-r-17", "--privacy.mechanism=gaussian", "--privacy.quantile=0.5"],
        "choose adaptive",
    ),
    (FLAIR, ["--runtime.engine=stock", "--runtime.lanes=2"], "has no effect where runtime.engine is stock"),
    (FLAIR, ["--config=c-r-17", "--runtime.check_engine=false"], "has no effect where mode is centralised"),
    (
        FLAIR,
        ["--federated.algorithm=fedncm", "--evaluation.best_by=last", "--runtime.check_engine=false"],
        "runtime.check_engine has no effect where federated.algorithm is fedncm",
    ),
    (FLAIR, ["--runtime.project=mine"], "has no effect where runtime.track is none"),
    (FLAIR, ["--local.virtual_size=64"], "set federated.weighting to users"),
    (VISION, ["--local.virtual_size=64"], "set federated.weighting to users"),
    (VISION, ["--personal.num_epochs=3"], "there is no config key personal"),
    (VISION, ["--evaluation.per_user=true"], "there is no config key evaluation.per_user"),
    (VISION, ["--evaluation.few_shot_below=3"], "there is no config key evaluation.few_shot_below"),
    (
        VISION,
        ["--local.effective_learning_rate=0.1", "--local.learning_rate=0.3"],
        "has no effect where local.effective_learning_rate is given",
    ),
]  # fmt: skip


@pytest.mark.parametrize("benchmark, argv, message", IDLE, ids=lambda v: v[-1] if isinstance(v, list) else "")
def test_a_key_without_effect_is_refused(
    benchmark: Benchmark[TrainingConfig], argv: list[str], message: str
) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        benchmark.parse(argv)
    assert message in str(caught.value)


def test_groups_of_a_pretrained_segmentation_network_are_those_of_its_decoder() -> None:
    words = ["--config=camvid-fl", "--model.pretrained=true", "--model.groups=8"]
    assert SEGMENTATION.parse(words).config.model.groups == 8
    with pytest.raises(ValueError, match=r"model\.groups has no effect where model\.pretrained is true"):
        DETECTION.parse([f"--config={DETECTION.settings[0]}", *words[1:]])


def test_a_yaml_is_judged_by_itself_and_its_macros_are_not(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("federated:\n  mu: 0.1\n")
    with pytest.raises(ValueError, match=r"mine\.yaml: federated\.mu has no effect"):
        parse([f"--config={path}"])
    path.write_text("federated:\n  mu: 0.1\n  algorithm: fedprox\n")
    assert config(f"--config={path}", "--federated.algorithm=fedavg").federated.mu is None
    assert (
        config("--scale=mini").centralised == FLAIR.default_config.centralised
    )  # the scale has epochs for the C rows


@pytest.mark.parametrize(
    "benchmark", [FLAIR, VISION, SEGMENTATION, DETECTION], ids=["flair", "vision", "masks", "boxes"]
)
def test_every_shipped_setting_is_made_of_keys_with_effect(benchmark: Benchmark[TrainingConfig]) -> None:
    for name in benchmark.settings:
        for scale in ([], *([f"--scale={scale}"] for scale in benchmark.scales)):
            made = benchmark.parse([f"--config={name}", *scale]).config
            assert benchmark.resolved(made) == made, (name, scale)


def test_what_follows_from_other_fields_is_written_down() -> None:
    assert config("--federated.algorithm=fedprox").federated.mu == 0.01
    assert config("--federated.algorithm=fednova").federated.mu == 0.0
    assert config("--federated.algorithm=fedprox", "--federated.mu=0").federated.mu == 0.0
    made = VISION.parse(["--config=cifar10-fedavgm", "--local.effective_learning_rate=0.3"]).config
    assert made.local.learning_rate == pytest.approx(0.03)


def test_the_privacy_of_a_recipe_counts_and_that_of_a_scale_is_for_private_settings(tmp_path: Path) -> None:
    benchmark = dataclasses.replace(FLAIR, recipes={"dp": {"privacy": {"epsilon": 3.0}}})
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: dp\nfederated:\n  weighting: users\n")
    for words in ([f"--config={path}"], ["--recipe=dp", "--federated.weighting=users"]):
        made = benchmark.parse(words).config.privacy
        assert made is not None
        assert made.epsilon == 3.0
    assert benchmark.parse(["--scale=mini"]).config.privacy is None


def test_the_weights_files_content_belongs_to_the_config(tmp_path: Path) -> None:
    one, other = tmp_path / "one.pth", tmp_path / "other.pth"
    one.write_bytes(b"one")
    other.write_bytes(b"other")
    words = ["--config=fl-f-17", f"--weights={one}"]
    made = config(*words)
    assert made.model.weights_sha256 == hashlib.sha256(b"one").hexdigest()
    assert digest(made) != digest(config("--config=fl-f-17", f"--weights={other}"))
    assert config_tree(config("--config=fl-f-17"))["model"]["weights_sha256"] is None
    assert "weights_sha256" not in config_tree(config())["model"], "digests from before stay"
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(config_tree(made)))
    with pytest.raises(ValueError, match=r"other\.pth is not the file that the config"):
        parse([f"--config={path}", f"--weights={other}"])
    with pytest.raises(ValueError, match="give their file with --weights"):
        build_model(parse([f"--config={path}"]).config, 17, None, MultiLabel())
    with pytest.raises(ValueError, match=r"nowhere\.pth: no such file"):
        parse(["--config=fl-f-17", "--weights=nowhere.pth"])
    with pytest.raises(ValueError, match="--weights can be used only if pretrained weights are loaded: add"):
        parse([f"--weights={one}"])
