"""The run directory: whose run it holds, the lines of ``metrics.jsonl``, and ``results.json``."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import yaml

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.digests import config_tree, digest, short_digest, tree_digest
from benchmarks.core.config.trees import Tree, differences, read_yaml
from benchmarks.core.secret import Secret, has_rounds, open_secret, public_secret, secret_path
from dataset.cli import refuse_broken_link
from dataset.files import sync, write_bytes, write_json, written
from dataset.pages import clean
from dataset.store.hdf5 import DataFile
from pfl_ext.checkpoint import previous, read_json
from pfl_ext.models.config import ALL_TARGETS, CALLED
from pfl_ext.workers.distributed import from_main, is_main

LENGTHS = ("federated.num_rounds", "centralised.num_epochs")
"""The keys that say how long a run is."""


def run_differences(known: Tree, run: AnyRun) -> list[str]:
    """``key: old -> new`` for every field in which a run is not the one of a ``config.yaml``.

    The file may be of an earlier version of the code, which knew fewer fields and wrote down some that have
    no effect: it is resolved first. What it does not say of the weights file cannot differ.

    Raises:
        ValueError: when the file holds a key that no version had, or a wrong value.
    """
    assert run.benchmark is not None
    old, new = config_tree(run.benchmark.read(known, "config.yaml")), config_tree(run.config)
    if "weights_sha256" not in known.get("model", {}):
        for tree in (old, new):
            tree["model"].pop("weights_sha256", None)
    for tree in (old, new):
        if tree["model"]["trained"] == "lora":  # the default is not what older runs did, so both are shown
            tree["model"].setdefault("lora_targets", CALLED)
    return differences(old, new)


def usable(directory: Path) -> Path:
    """The path of a run directory.

    Raises:
        ValueError: where it cannot be one.
    """
    refuse_broken_link("--run_dir", directory)
    if str(directory) != str(directory).encode(errors="replace").decode():
        raise ValueError(f"--run_dir {clean(directory)} has letters that are not UTF-8: choose another name")
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"--run_dir {directory} is a file: choose another folder")
    return directory


def directory_of(run: AnyRun, data_path: Path) -> Path:
    """The folder of a run's files: ``--run_dir``, or one of runs/ that names setting, data and seed.

    Where the config has another algorithm than its setting, the name says it; names of earlier versions did
    not, and a run that began under one stays there. Where a folder holds a run of another config, the name
    has the config's digest at its end.
    """
    config = run.config
    if run.run_dir is not None:
        return Path(str(run.run_dir).replace("{digest}", short_digest(config)))
    assert run.benchmark is not None
    names = (run.benchmark.name_of(config, "-"), config.setting)
    plain, older = (Path("runs") / f"{name.lower()}-{data_path.stem}-seed{config.seed}" for name in names)
    for path in (older, plain):
        with_digest = path.with_name(f"{path.name}-{short_digest(config)}")
        if has_begun(with_digest):
            return with_digest
        if has_begun(path) and not _differs(path, run, damaged=path != plain):
            return path
    return with_digest if has_begun(plain) else plain


def _differs(directory: Path, run: AnyRun, damaged: bool) -> bool:
    """Whether a directory in which a run has begun holds one of another config.

    Where its config cannot be read, that is ``damaged``: a folder that is this run's by its name is then
    refused, instead of a second one being begun.
    """
    try:
        return bool(run_differences(read_yaml(directory / "config.yaml"), run))
    except ValueError:
        return damaged


def has_begun(directory: Path) -> bool:
    """Whether a run has left a step in a directory; a directory without one is free."""
    begun = (directory / "results.json").exists() or has_rounds(directory)
    return begun and (directory / "config.yaml").exists()


def has_checkpoint(directory: Path) -> bool:
    """Whether a run can go on from what the directory holds."""
    last = directory / "checkpoint" / "last.safetensors"
    return last.exists() or previous(last).exists()


class RunDirectory:
    """Owner of the files of one run, but for its checkpoints. Worker 0 reads and writes.

    Nothing is written before `begin`.

    Args:
        run: the run whose directory this is, or is to become.
        path: where it lies.
        file: what the run learns from; None: not known.

    Raises:
        ValueError: when the directory holds a run of another config or of other data, or a run and
            ``resume="never"``.
    """

    def __init__(self, run: AnyRun, path: Path, file: DataFile | None = None) -> None:
        self.run, self.path, self._file = run, path, file
        self.data_sha256 = "" if file is None else file.fingerprint
        self._metrics = path / "metrics.jsonl"
        self.precision: str = run.runtime.precision
        """In which arithmetic the run is trained."""
        self.config_sha256: str = from_main(self._config_sha256() if is_main() else None)
        """Digest of the directory's config.yaml, or of the one that will be written there."""

    def _config_sha256(self) -> str:
        """The digest of the config that the directory holds, if it is this run's; else refuse."""
        if not has_begun(self.path):
            return digest(self.run.config)
        if self.run.resume == "never":
            raise ValueError(
                f"{self.path} already has a run: choose another --run_dir, or add --resume auto to "
                "continue it"
            )
        known = read_yaml(self.path / "config.yaml")
        try:
            changed = run_differences(known, self.run)
        except ValueError as fault:
            raise ValueError(
                f"{self.path / 'config.yaml'} is damaged or of another version of the code: {fault}"
            ) from fault
        if changed:
            model, more = self.path / "model.safetensors", ""
            if len(changed) == 1 and changed[0].startswith(LENGTHS) and has_checkpoint(self.path):
                more = f"; to train this run for longer, add --extend {self.path}"
            elif changed == [f"model.lora_targets: {CALLED} -> {ALL_TARGETS}"]:
                more = f"; to continue this older run, add --model.lora_targets {CALLED}"
            elif model.exists() and any(change.startswith(LENGTHS) for change in changed):
                switch = "" if self.run.config.model.pretrained else self._switch()
                more = (
                    f"; to start a new run from its model, add {switch}--weights {model} "
                    "--model.keep_head true"
                )
            raise ValueError(
                f"{self.path} has a run of another config ({'; '.join(changed)}): choose another "
                f"--run_dir{more}"
            )
        data = self.path / "checkpoint" / "data.json"
        learnt = read_json(data).get("sha256") if data.exists() else self.data_sha256
        if learnt != self.data_sha256:
            raise ValueError(
                f"{self.path} has a run on other data (content {str(learnt)[:12]}, but --data_path has "
                f"{self.data_sha256[:12]}): give its data file, or choose another --run_dir"
            )
        return tree_digest(known)

    def _switch(self) -> str:
        """The words by which another run begins with the network of this one, which began from scratch."""
        results = self.path / "results.json"
        norm = str(read_json(results).get("norm")) if results.exists() else ""
        return "--model.pretrained true " + ("--model.norm group " if "GroupNorm" in norm else "")

    def begin(self) -> None:
        """Make the directory this run's own; the caller holds its lock."""
        if not is_main():
            return
        self.config_sha256 = self._config_sha256()  # another process may have begun here meanwhile
        begun = has_begun(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "checkpoint" / "data.json", {"sha256": self.data_sha256})
        if not begun:
            text = yaml.safe_dump(config_tree(self.run.config), sort_keys=False)
            write_bytes(self.path / "config.yaml", text.encode())

    def finished(self) -> Tree | None:
        """The results of this run, if it has already ended; a secret that a kill left behind is deleted."""
        path = self.path / "results.json"
        results = from_main(read_json(path) if is_main() and path.exists() else None)
        if results is None or results.get("config_sha256") != self.config_sha256:
            return None
        secret = secret_path(self.path)
        if is_main() and secret.exists():  # a folder that cannot be written refuses to remove nothing, too
            with written(secret):
                secret.unlink(missing_ok=True)
        return dict(results)

    def secret(self) -> Secret | None:
        """What a private run's noise is drawn from; None without privacy.

        Raises:
            ValueError: when a round might be released a second time with other noise.
        """
        config = self.run.config
        privacy = config.privacy or config.local_privacy
        if privacy is None:
            return None
        if privacy.noise_seed == "run":
            return public_secret(self.path, config.seed)
        content = "" if self._file is None else self._file.content_sha256()
        return open_secret(self.path, self.config_sha256, content, self.precision)

    def history(self) -> list[Tree]:
        """The lines of ``metrics.jsonl`` so far."""
        return [json.loads(line) for line in self._lines().splitlines()]

    def append(self, line: Tree) -> None:
        """Write one more line."""
        with written(self._metrics), self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")

    def _lines(self) -> bytes:
        return self._metrics.read_bytes() if self._metrics.exists() else b""

    def flushed(self) -> Tree:
        """What a checkpoint notes of the lines so far, which are on the disk before it counts on them."""
        if self._metrics.exists():
            with written(self._metrics):
                sync(self._metrics)
        lines = self._lines()
        return {"metrics_bytes": len(lines), "metrics_sha256": hashlib.sha256(lines).hexdigest()}

    def cut(self, state: Tree) -> int:
        """Leave the lines that a checkpoint knows by `flushed`; how many lines there were before.

        Raises:
            ValueError: when some of them are gone or changed.
        """
        content, length = self._lines(), state["metrics_bytes"]
        kept = content[:length]
        if hashlib.sha256(kept).hexdigest() != state["metrics_sha256"]:
            raise ValueError(
                f"{self._metrics} does not belong to the checkpoint: restore it, or choose another --run_dir"
            )
        if self._metrics.exists():
            os.truncate(self._metrics, length)
        return kept.count(b"\n") + content[length:].count(b"\n")

    def remove_lines(self) -> int:
        """Remove all lines, as no checkpoint knows them; how many there were."""
        lines = self._lines().count(b"\n")
        self._metrics.unlink(missing_ok=True)
        return lines
