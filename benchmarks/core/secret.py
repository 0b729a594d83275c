"""The secret of a private run: the number from which its noise and its cohorts are drawn.

Whoever knows it can subtract the noise, so it is drawn from the operating system's entropy, lies in
``checkpoint/noise_seed`` (readable by its owner alone) while the run lasts, and is deleted after the last
file of the run is written. Three rules keep a round from being released with two different noises:

* A secret is drawn only where nothing was released yet. A directory with a checkpoint, with lines of
  ``metrics.jsonl``, or with ``privacy.json``, but without its secret, is refused.
* Every checkpoint holds SHA-256 of the secret, as does ``privacy.json``, which is written before the first
  line. Both are refused beside another secret.
* The noise is drawn from (secret, config digest, data digest, round), and the file names both digests, so
  that a copied secret meets no other data.

Rounds that a kill undid are made again with the same noise, so their sums must be the same as well: the
difference of two sums with one noise has none. The file therefore names the precision of training too.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from pathlib import Path

from dataset.files import write_bytes
from pfl_ext import checkpoint
from pfl_ext.randomness import derive
from pfl_ext.workers.distributed import from_main, is_main


@dataclass(frozen=True)
class Secret:
    """What all workers know of the secret."""

    noise_seed: int
    """128 bits, for the noise of all rounds."""
    cohort_seed: int
    """128 bits, for the cohorts of all rounds."""
    sha256: str | None
    """Digest of the secret, for checkpoints; None where the noise comes from the run's public seed."""
    path: Path

    @property
    def is_public(self) -> bool:
        """Whether anybody who has the config can draw the noise again: for research only."""
        return self.sha256 is None

    def check(self, sha256: str | None) -> None:
        """Refuse a checkpoint that was written with another secret; ``sha256`` is what it holds.

        Raises:
            ValueError: when the two differ.
        """
        if self.sha256 != sha256:
            raise ValueError(
                f"{self.path} does not belong to the checkpoint beside it, so rounds would be released "
                "again with other noise: restore the file, or choose another --run_dir"
            )

    def close(self) -> None:
        """Delete the file, after everything else of the run is written."""
        self.path.unlink(missing_ok=True)


def secret_path(directory: Path) -> Path:
    """The path of a run's secret."""
    return directory / "checkpoint" / "noise_seed"


def statement_path(directory: Path) -> Path:
    """The path of the file in which a run says what it has spent."""
    return directory / "privacy.json"


def public_secret(directory: Path, seed: int) -> Secret:
    """Noise from the run's seed: anybody can draw it again, and subtract it."""
    drawn = derive(seed, "secret of the run")
    return Secret(drawn, derive(drawn, "cohorts"), None, secret_path(directory))


def open_secret(directory: Path, config_sha256: str, data_sha256: str, precision: str = "fp32") -> Secret:
    """The directory's secret, drawn if no round was released yet.

    Worker 0 reads the file and sends the secret to the others.

    Raises:
        ValueError: when the directory has rounds but no secret, or when the secret is damaged or belongs to
            another config, other data or other rounds, or when these were trained in another precision.
    """
    path = secret_path(directory)
    keys = (config_sha256, data_sha256)
    text = str(from_main(_read(directory, path, keys, precision) if is_main() else None))
    drawn = int(text)
    return Secret(
        noise_seed=derive(drawn, "noise", *keys),
        cohort_seed=derive(drawn, "cohorts", *keys),
        sha256=_sha256(text),
        path=path,
    )


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _read(directory: Path, path: Path, keys: tuple[str, str], precision: str) -> str:
    released = has_rounds(directory)
    if not path.exists():
        if released:
            raise ValueError(
                f"{path} is missing, but {directory} has rounds that were made with it, and would be "
                "released a second time with a new secret: restore the file, or choose another "
                "--run_dir"
            )
        return _draw(path, keys, precision)
    try:
        held = json.loads(path.read_bytes())
        text, found = str(int(held["secret"])), (held["config_sha256"], held["data_sha256"])
        trained = held.get("precision", precision)
    except (ValueError, KeyError, TypeError, AttributeError):
        if not released:
            return _draw(path, keys, precision)
        raise ValueError(
            f"{path} is damaged, or of an older version: restore it, or choose another --run_dir"
        ) from None
    if not released:
        return text if (*found, trained) == (*keys, precision) else _draw(path, keys, precision)
    if found != keys:
        raise ValueError(
            f"{path} belongs to a run of another config or on other data, and a secret must not be used "
            "twice: choose another --run_dir"
        )
    statement = statement_path(directory)
    stated = checkpoint.read_json(statement).get("secret_sha256") if statement.exists() else None
    if stated not in (None, _sha256(text)):
        raise ValueError(
            f"{path} does not belong to {statement}, so rounds would be released again with other "
            "noise: restore the file, or choose another --run_dir"
        )
    if trained != precision:
        raise ValueError(
            f"{directory} has rounds that were trained with runtime.precision {trained}; to repeat them "
            f"with {precision} and the same noise would reveal their difference: set runtime.precision "
            f"to {trained}, or choose another --run_dir"
        )
    return text


def _draw(path: Path, keys: tuple[str, str], precision: str) -> str:
    text = str(secrets.randbits(128))
    content = {"secret": text, "config_sha256": keys[0], "data_sha256": keys[1], "precision": precision}
    write_bytes(path, json.dumps(content).encode(), mode=0o600)
    return text


def has_rounds(directory: Path) -> bool:
    """Whether the directory holds a round: a checkpoint, a line of metrics, or what was spent."""
    last, lines = directory / "checkpoint" / "last.safetensors", directory / "metrics.jsonl"
    if any(path.exists() for path in (last, checkpoint.previous(last), statement_path(directory))):
        return True
    return lines.exists() and lines.stat().st_size > 0
