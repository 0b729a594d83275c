"""Which fields of a config have no effect on its run, because another field has switched them off; and
which values cannot stand together.

A key without effect is refused where somebody gives it, and stands at its default in the resolved config: two
configs that make the same run are equal, and have the same digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from benchmarks.core.config.sections import LocalConfig, Runtime, TrainingConfig
from benchmarks.core.config.trees import leaves
from benchmarks.core.config.updates import check_updates, counts_alike
from pfl_ext.aggregation.rule import MEAN
from pfl_ext.attacks.attack import HONEST
from pfl_ext.compression.compressor import PLAIN
from pfl_ext.models.config import ON_FEATURES, ModelConfig
from pfl_ext.models.decoders import outputs_of
from pfl_ext.models.small import network_keys
from pfl_ext.rules import refuse
from pfl_ext.schedules import READ_BY, ScheduleConfig


class Idle(NamedTuple):
    """Keys that a run does not read. A key that ends with a dot stands for its whole section."""

    keys: str
    """Separated by blanks."""
    because: str
    """The field that switches them off, with its value."""
    instead: str
    """What would give them an effect."""


OF_ENGINE = "lanes fuse tune cpu_kernels check_engine"
"""The keys of ``runtime`` that only the engine reads."""
OF_TRAINED = {
    "last_blocks": "model.last_blocks",
    "lora": "model.lora_rank model.lora_alpha model.lora_trained model.lora_targets",
    "names": "model.trained_names",
}
"""The keys that only this value of ``model.trained`` reads."""
OF_AVERAGE = "evaluation.average_from_round evaluation.average_every"
OF_EMA = "evaluation.average_decay"
"""The keys that only an average of models reads, and only an exponential one."""
Reasons = dict[str, str]
"""The reason why each idle key or section is idle, and what to do."""


def reasons(rules: Iterator[Idle]) -> Reasons:
    """One sentence for each key of these rules; the first rule that names a key counts."""
    out: Reasons = {}
    for rule in rules:
        for key in rule.keys.split():
            out.setdefault(key, f"has no effect where {rule.because}: remove it, or {rule.instead}")
    return out


def reason_for(key: str, idle: Mapping[str, str]) -> str | None:
    """Why a dotted key has no effect; None where it has one."""
    names = {key, *(key[: place + 1] for place, letter in enumerate(key) if letter == ".")} & idle.keys()
    return next(why for name, why in idle.items() if name in names) if names else None


def idle_by_mode(mode: str) -> Idle:
    """What is for the other mode."""
    if mode == "centralised":
        updates = "compression. aggregation. attack. devices devices."
        return Idle(
            f"local. server. federated. {updates} augment.noise_by_user evaluation.every_rounds",
            "mode is centralised",
            "set mode to federated",
        )
    return Idle("centralised. evaluation.every_epochs", "mode is federated", "set mode to centralised")


def draws_crops(config: TrainingConfig) -> bool:
    """Whether a training image is not always the whole image as it is."""
    whole = config.augment.crop == "crop" and config.model.input_size == config.data.image_size
    return config.augment.flip != "none" or not whole


def idle_in_training(config: TrainingConfig) -> Iterator[Idle]:
    """The rules that every benchmark shares."""
    yield idle_by_mode(config.mode)
    yield from (_idle_in_centralised if config.mode == "centralised" else _idle_in_federated)(config)
    section = config.local if config.mode == "federated" else config.centralised
    if section.batch_size == 1:
        name = "local" if config.mode == "federated" else "centralised"
        yield Idle("augment.mixup augment.cutmix", f"{name}.batch_size is 1", "raise it")
    if config.augment.crop != "padded":
        because = f"augment.crop is {config.augment.crop}"
        yield Idle("augment.padding", because, "set augment.crop to padded")
    if config.augment.noise is None:
        yield Idle("augment.noise_by_user", "augment.noise is none", "give augment.noise")
    because = f"evaluation.average is {config.evaluation.average}"
    if config.evaluation.average != "ema":
        yield Idle(OF_EMA, because, "set evaluation.average to ema")
    if config.evaluation.average == "none":
        yield Idle(OF_AVERAGE, because, "set evaluation.average to ema or swa")
    for kind, keys in OF_TRAINED.items():
        if config.model.trained != kind:
            yield Idle(keys, f"model.trained is {config.model.trained}", f"set model.trained to {kind}")
    if config.model.trained not in ON_FEATURES:
        because = f"model.trained is {config.model.trained}"
        yield Idle("model.feature_format augment.views", because, "set model.trained to head")
    if config.loss.absent_gamma == config.loss.focal_gamma:
        because = f"loss.focal_gamma is {config.loss.focal_gamma:g}, too"
        yield Idle("loss.absent_gamma", because, "give another value")
    if not draws_crops(config):
        because = "augment.flip is none and crops are whole images"
        yield Idle("augment.views", because, "choose a flip or a crop")
    yield from _idle_in_model(config.model)


def _idle_in_model(model: ModelConfig) -> Iterator[Idle]:
    for key, names in network_keys().items():
        if model.arch not in names:
            because = f"model.arch is {model.arch}"
            yield Idle(f"model.{key}", because, f"set model.arch to {' or '.join(names)}")
    if model.random_features is None:
        because = "model.random_features is none"
        yield Idle("model.random_features_width", because, "give model.random_features")
    if model.channel_norm == "data":
        yield Idle("model.groups", "model.channel_norm is data", "set model.channel_norm to group")
    # the decoder of a network for pixels is new, and has norms of these groups
    if model.has_fixed_statistics and outputs_of(model.arch) != "pixels":
        yield Idle("model.groups", "model.pretrained is true", "set model.pretrained to false")
    if not model.pretrained:
        keys = "model.norm model.weights_sha256 model.keep_head"
        yield Idle(keys, "model.pretrained is false", "set model.pretrained to true")


def _idle_in_schedule(section: str, chosen: ScheduleConfig) -> Iterator[Idle]:
    known = next(get_args(leaf.hint) for leaf in leaves(type(chosen)) if leaf.key == "schedule")
    for key, schedules in READ_BY.items():
        if chosen.schedule not in schedules:
            readers = " or ".join(name for name in schedules if name in known)
            yield Idle(f"{section}.{key}", f"{section}.schedule is {chosen.schedule}", f"choose {readers}")


def _idle_in_centralised(config: TrainingConfig) -> Iterator[Idle]:
    yield from _idle_in_schedule("centralised", config.centralised)
    if config.centralised.optimizer == "sgd":
        keys = "centralised.beta1 centralised.beta2 centralised.epsilon"
        yield Idle(keys, "centralised.optimizer is sgd", "choose adam")
    else:
        yield Idle("centralised.momentum", "centralised.optimizer is adam", "choose sgd")
    if not config.centralised.warmup_epochs:
        because = "centralised.warmup_epochs is 0"
        yield Idle("centralised.warmup_learning_rate", because, "give centralised.warmup_epochs")


def _idle_in_federated(config: TrainingConfig) -> Iterator[Idle]:
    federated, local, server = config.federated, config.local, config.server
    yield _idle_by_algorithm(config, federated.chosen.idle)
    for section in (federated, server):
        for key, names in section.readers().items():
            # with an effective rate, the users' rate is a multiple of 1 - server.momentum
            is_read = key == "server.momentum" and local.effective_learning_rate is not None
            if section.name not in names and not is_read:
                because = f"{section.registry.key} is {section.name}"
                yield Idle(key, because, f"choose {' or '.join(names)}")
    if counts_alike(config):
        because = f"aggregation.kind is {config.aggregation.kind}, for which users count alike"
        yield Idle("federated.weighting", because, "set aggregation.kind to mean")
    if config.attack.kind == HONEST:
        yield Idle("attack.share", f"attack.kind is {HONEST}", "choose an attack")
    if federated.reweight == "none":
        yield Idle("federated.max_importance", "federated.reweight is none", "choose fedir")
    yield from _idle_in_local(local)
    yield from _idle_in_schedule("local", local)
    yield from _idle_in_schedule("server", server)
    if config.privacy is not None and config.privacy.mechanism != "adaptive":
        keys = "privacy.quantile privacy.clip_step privacy.indicator_std_fraction"
        yield Idle(keys, f"privacy.mechanism is {config.privacy.mechanism}", "choose adaptive")
    if config.privacy is not None and config.model.channel_norm == "group":
        keys = "privacy.moments_multiplier privacy.mean_bound privacy.square_bound"
        yield Idle(keys, "model.channel_norm is group", "set model.channel_norm to data")


def _idle_in_local(local: LocalConfig) -> Iterator[Idle]:
    if local.effective_learning_rate is not None:
        because = "local.effective_learning_rate is given"
        yield Idle("local.learning_rate", because, "set local.effective_learning_rate to none")
    size = "max_images" if local.virtual_size is None else "virtual_size"
    if getattr(local, size) == 1 and not (local.straddle and local.num_epochs > 1):
        yield Idle("augment.mixup augment.cutmix", f"local.{size} is 1", "raise it")
    if local.virtual_size is not None:
        because = "local.virtual_size is given"
        yield Idle("local.max_images local.cap", because, "set local.virtual_size to none")
    elif local.max_images is None:
        yield Idle("local.cap", "local.max_images is none", "give local.max_images")
    if local.optimizer == "sgd":
        keys = "local.beta1 local.beta2 local.epsilon"
        yield Idle(keys, "local.optimizer is sgd", "choose adam or adamw")
    else:
        yield Idle("local.momentum", f"local.optimizer is {local.optimizer}", "choose sgd")
    if not local.shuffle:
        yield Idle("local.reshuffle", "local.shuffle is false", "set local.shuffle to true")
    if local.max_grad_norm is None:
        yield Idle("local.clip_by", "local.max_grad_norm is none", "give local.max_grad_norm")


def _idle_by_algorithm(config: TrainingConfig, keys: str) -> Idle:
    return Idle(keys, f"federated.algorithm is {config.federated.algorithm}", "choose fedavg")


def idle_in_runtime(config: TrainingConfig, runtime: Runtime) -> Iterator[Idle]:
    """The rules for `Runtime`; keys without their ``runtime.``."""
    if config.mode == "federated":
        unread = config.federated.chosen.idle_in_runtime
        yield _idle_by_algorithm(config, f"{unread} {OF_ENGINE}" if "engine" in unread.split() else unread)
    if config.mode == "centralised":
        keys = "lanes fuse tune check_engine accumulate reduce"
        yield Idle(keys, "mode is centralised", "set mode to federated")
    if config.mode == "federated":
        yield from _untuned(config, runtime)
    if runtime.engine == "stock":
        yield Idle(OF_ENGINE, "runtime.engine is stock", "set runtime.engine to fast")
    if config.model.trained not in (*ON_FEATURES, "last_blocks", "names"):
        because = f"model.trained is {config.model.trained}"
        yield Idle("cache_features", because, "set model.trained to head")
    if runtime.track != "wandb":
        keys = "project entity name artifact"
        yield Idle(keys, f"runtime.track is {runtime.track}", "set runtime.track to wandb")


def _untuned(config: TrainingConfig, runtime: Runtime) -> Iterator[Idle]:
    """Why the engine of a run cannot be tuned."""
    if not config.federated.chosen.tunes_engine:
        yield _idle_by_algorithm(config, "tune")
    kinds = {"compression": config.compression.kind, "aggregation": config.aggregation.kind}
    for section, kind in (kinds | {"attack": config.attack.kind}).items():
        if kind not in (PLAIN, MEAN, HONEST, "norm_bound"):
            yield Idle("tune", f"{section}.kind is {kind}", f"leave out {section}")
    if runtime.lanes is not None and runtime.fuse is not None:
        yield Idle("tune", "runtime.lanes and runtime.fuse are given", "leave one of them out")
    if runtime.deterministic:
        yield Idle("tune", "runtime.deterministic is true", "set runtime.deterministic to false")


def check_training(config: TrainingConfig) -> None:
    """Refuse combinations that no run of any benchmark could mean.

    Raises:
        ValueError: one line that names the key and what to do.
    """
    if config.model.input_size > config.data.image_size:
        raise ValueError(
            f"model.input_size is {config.model.input_size}, but must be at most data.image_size = "
            f"{config.data.image_size}, because the network's input is cut from the image: lower it"
        )
    if config.model.channel_norm == "data":
        _check_channel_norm(config)
    config.augment.check(config.model.input_size)
    if config.model.parties is not None:
        _check_parties(config)
    _check_average(config)
    if config.mode == "centralised":
        central = config.centralised
        central.check_schedule(
            "centralised", central.learning_rate, central.num_epochs, central.head_rate_factor
        )
        central.check_warmup()
    else:
        _check_federated(config)


def _check_channel_norm(config: TrainingConfig) -> None:
    """Refuse moments of the training images for channels where layers, noise or views rule them out."""
    if config.model.trained not in ON_FEATURES:
        raise ValueError(
            "model.channel_norm data works only with frozen layers, but model.trained is "
            f"{config.model.trained}: set model.trained to head, or model.channel_norm to group"
        )
    if config.privacy and config.privacy.moments_multiplier is None:
        raise ValueError(
            "model.channel_norm data reads all training images, but privacy.moments_multiplier is "
            "none: set it to the noise multiplier of their moments, or set model.channel_norm to group"
        )
    if config.augment.views is not None:
        raise ValueError(
            f"augment.views is {config.augment.views}, but model.channel_norm data uses only one view "
            "of each image: set augment.views to none, or model.channel_norm to group"
        )


def _check_parties(config: TrainingConfig) -> None:
    """Refuse networks for places of images, and rates by layer: each party has a network of its own."""
    if outputs_of(config.model.arch) != "image":
        raise ValueError(
            f"model.parties is {config.model.parties}, but {config.model.arch} has outputs for places of the "
            "image, of which each party has others: set model.parties to none"
        )
    trained = config.local, config.centralised
    if any(section.head_rate_factor != 1 for section in (*trained, config.server)):
        raise ValueError(
            f"model.parties is {config.model.parties}, so there are several last layers, but "
            "head_rate_factor applies only to one: set it to 1"
        )
    if any(section.layer_decay != 1 for section in trained):
        raise ValueError(
            f"model.parties is {config.model.parties}, so no block is the first of all, but layer_decay "
            "counts the blocks of a single network: set it to 1"
        )


def _check_federated(config: TrainingConfig) -> None:
    federated, local, server = config.federated, config.local, config.server
    rounds = federated.num_rounds
    local.check_schedule("local", config.local_learning_rate, rounds, local.head_rate_factor)
    server.check_schedule("server", server.learning_rate, rounds, server.head_rate_factor)
    server.rate(0, rounds)  # refuses a warm-up that is too long
    weighting_unread = "federated.weighting" in federated.chosen.idle.split() or counts_alike(config)
    by_images = federated.weighting == "images" and not weighting_unread
    local.check_virtual(by_images)
    proportional = federated.sampling == "proportional"
    refuse(federated.chosen.refusals, replacement=federated.replacement, proportional=proportional)
    if proportional and by_images:
        raise ValueError(
            "federated.sampling is proportional and federated.weighting is images, so a user's number of "
            "images would count twice: set federated.weighting to users"
        )
    if config.devices is not None:
        config.devices.check_epochs(local.num_epochs, federated.replacement)
    check_updates(config)
    if federated.chosen.only_last and config.evaluation.best_by != "last":
        raise ValueError(
            f"evaluation.best_by is {config.evaluation.best_by}, but federated.algorithm "
            f"{federated.name} has a model for all users only after the last round: set "
            "evaluation.best_by to last"
        )


def _check_average(config: TrainingConfig) -> None:
    evaluation, federated = config.evaluation, config.federated
    if evaluation.average == "none":
        return
    if config.mode == "federated" and not federated.chosen.has_server_model:
        raise ValueError(
            f"evaluation.average is {evaluation.average}, but federated.algorithm {federated.name} has no "
            "model of the server that could be averaged over rounds: set evaluation.average to none, or "
            "choose another algorithm, such as fedavg"
        )
    if config.mode == "federated" and getattr(federated.chosen_options, "scores_users", False):
        raise ValueError(
            f"evaluation.average is {evaluation.average}, but {federated.name} scores the server's own model "
            "on users' images, and not the average: set evaluation.average to none, or "
            "federated.options.held_out and scored_on to their defaults"
        )
    steps = f"{config.mode}.num_{config.unit}s"
    if evaluation.average_from_round >= config.num_steps:
        raise ValueError(
            f"evaluation.average_from_round is {evaluation.average_from_round}, but must be below "
            f"{steps} = {config.num_steps}, or nothing would be averaged: lower it"
        )
    most = config.num_steps - evaluation.average_from_round
    if evaluation.average_every > most:
        raise ValueError(
            f"evaluation.average_every is {evaluation.average_every}, but must be at most {most}, {steps} "
            "minus evaluation.average_from_round, or the first model would stay alone: lower it"
        )
