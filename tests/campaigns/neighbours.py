"""Private options drawn at random: one user moves what is released by no more than the bound.

    python -m tests.campaigns.neighbours --draws 100 --state neighbours.json [--seed 0] [--only flair]

A draw is a private config: a benchmark, the bound, the mechanism, the sampler, the learning rate, and other
keys that the config accepts beside them. Each draw has two checks:

* **Sums.** In each round every user of the cohort is left out in turn. The sum before noise moves by the
  clipping bound at most, in the norm of the mechanism, but for the rounding of float32; a count moves by 1 at
  most, and the vote of adaptive clipping by 1/2. The same users have the same sum, bit for bit.
* **Files**, with central privacy and ``privacy.release public``. Two data sets differ in the images, the
  labels and the number of images of one user. With equal secrets, and zeros in the place of sums, all files
  of both runs are the same, byte for byte, but for ``checkpoint/``, which is not released.

A finding is a check that fails, an exception, or an error of several lines.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.common_types import Population

from benchmarks.core import run_directory
from dataset.flair.mini import draw_images, mini_index
from dataset.flair.mini_outlines import boxed_index, masked_index
from dataset.store.writer import DataWriter
from pfl_ext.backend import CentrallyEvaluatedBackend
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.devices.turnout import Turnout, Turnouts
from pfl_ext.privacy import moments
from pfl_ext.privacy.central import TALLY, NoisyMean
from tests.campaigns.combinations import DATA, Campaign, conduct
from tests.campaigns.drawn_options import SUBJECTS, drawn_privately

OTHER = f"{DATA} of a neighbour"
INDEXES = {"segmentation": masked_index, "detection": boxed_index}
ROUNDING = 2**-22
"""Largest relative rounding of a sum, for each user in it."""
VOTE = 0.5
PUBLIC = ("--privacy.release=public", "--privacy.noise_seed=entropy")


class Summed(Exception):
    """Holds a round's sum before noise, and its tally; what comes after is not looked at."""


def _replace(owner: Any, name: str, made: Callable[[Any], Any]) -> None:
    setattr(owner, name, made(getattr(owner, name)))


class Sums:
    """Wrapped around a run of this process: notes in a file how far each user moves each round's sum."""

    def __init__(self, notes: Path) -> None:
        self._notes, self._without, self._looking = notes, -1, False

    def install(self) -> None:
        """Once a process."""
        _replace(NoisyMean, "postprocess_server", self._at_the_sum)
        _replace(FederatedImageDataset, "cohort", self._of_a_cohort)
        _replace(Turnouts, "of", self._of_a_turnout)
        _replace(CentrallyEvaluatedBackend, "gather_results", self._in_a_round)

    def _at_the_sum(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def summed(mean: NoisyMean, *, stats: Any, **more: Any) -> Any:
            if not self._looking:
                return real(mean, stats=stats, **more)
            parts = [stats[name].detach().double().reshape(-1) for name in sorted(stats) if name != TALLY]
            raise Summed(torch.cat(parts), stats[TALLY].detach().double().reshape(-1))

        return summed

    def _of_a_cohort(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def cohort(data: FederatedImageDataset, *words: Any) -> Any:
            users = real(data, *words)
            return users[users != self._without]

        return cohort

    def _of_a_turnout(self, real: Callable[..., Turnout]) -> Callable[..., Turnout]:
        def turnout(turnouts: Turnouts, number: int) -> Turnout:
            found = real(turnouts, number)
            kept = found.users != self._without
            return replace(found, users=found.users[kept], steps=found.steps[kept])

        return turnout

    def _in_a_round(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def gathered(backend: Any, *words: Any, central_context: Any) -> Any:
            work = partial(real, backend, *words, central_context=central_context)
            if central_context.population == Population.TRAIN:
                data, mean = backend._images, backend._postprocessors[-1]
                data.set_round(central_context.current_central_iteration)
                self._note(mean, data.cohort(central_context.cohort_size).tolist(), work)
            return work()

        return gathered

    def _note(self, mean: NoisyMean, users: Sequence[int], work: Callable[[], Any]) -> None:
        bound, order = mean.clipping_bound, mean._mechanism.order
        whole, tally = self._sum(work, -1)
        again, _ = self._sum(work, -1)
        size = float(torch.linalg.vector_norm(whole, order))
        slack = len(users) * ROUNDING * max(size, bound)
        said = [] if torch.equal(whole, again) else ["the same users have another sum"]
        most = 0.0
        for user in users:
            less, counts = self._sum(work, user)
            moved = float(torch.linalg.vector_norm(whole - less, order))
            most = max(most, moved)
            if not moved <= bound + slack:  # also where it is not a number
                said.append(f"user {user} moves the sum by {moved / bound:.6g} of the bound")
            present, clipped, refused, _, vote = (tally - counts).abs().tolist()  # norms are not released
            if max(present, clipped, refused) > 1 or vote > VOTE:
                said.append(f"user {user} moves the tally by {(tally - counts).tolist()}")
        with self._notes.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"moved": most / bound, "said": said}) + "\n")

    def _sum(self, work: Callable[[], Any], without: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._without, self._looking = without, True
        try:
            work()
        except Summed as found:
            sum_, tally = found.args
            return sum_, tally
        finally:
            self._without, self._looking = -1, False
        raise AssertionError("the round came to no sum")


def hide_sums_and_secrets() -> None:
    """Have this process draw known secrets, and see zeros and three users in the place of each sum."""

    def at_the_sum(real: Callable[..., Any]) -> Callable[..., Any]:
        def nothing(mean: NoisyMean, *, stats: Any, **more: Any) -> Any:
            for name in stats:
                stats[name] = torch.zeros_like(stats[name])
            stats[TALLY][0] = 3
            return real(mean, stats=stats, **more)

        return nothing

    def of_any_data(real: Callable[..., Any]) -> Callable[..., Any]:
        return lambda directory, config, data, precision: real(directory, config, "any", precision)

    _replace(NoisyMean, "postprocess_server", at_the_sum)
    _replace(run_directory, "open_secret", of_any_data)
    _replace(secrets, "randbits", lambda real: lambda bits: 2**63 + 1)
    _replace(moments, "clipped", lambda real: lambda vectors, bound: np.zeros_like(vectors))


class Neighbours(Campaign):
    """Private draws, one after another, in one folder."""

    draw = staticmethod(drawn_privately)

    def write(self, subject: str, path: Path) -> None:
        """The subject's data; in `OTHER` the last user has two images fewer, and those of others."""
        spec = SUBJECTS[subject].spec
        index = INDEXES.get(subject, mini_index)(spec)
        train = index.splits["train"]
        start, end = train.user_offsets[-2:]
        rows = np.arange(end)
        if path.parent.name == OTHER:
            rows = np.concatenate([rows[:start], np.arange(max(1, end - start - 2)) * 3 % start])
        offsets = np.concatenate([train.user_offsets[:-1], [len(rows)]])
        changed = replace(
            train,
            user_offsets=offsets,
            user_index=np.repeat(np.arange(len(train.user_ids)), np.diff(offsets)).astype(np.int32),
            image_ids=list(train.image_ids)[: len(rows)],
            annotations={name: each.take(rows) for name, each in train.annotations.items()},
            image_sizes=None if train.image_sizes is None else train.image_sizes[rows],
        )
        written = replace(index, splits={**index.splits, "train": changed})
        with DataWriter(path, written, storage="raw", image_size=spec.image_size) as writer:
            for name, split in written.splits.items():
                drawn_from = rows if name == "train" else np.arange(split.num_images)
                images = [draw_images(spec, index, name, np.array([row])) for row in drawn_from]
                writer.write(name, np.arange(len(images)), np.concatenate(images))

    def judge(self, subject: str, words: tuple[str, ...]) -> tuple[str, str]:
        """``(kind, what)``: refused, fine or finding."""
        self.clear()
        notes = self.folder / "sums.jsonl"
        notes.unlink(missing_ok=True)
        ended = self.begun(subject, words, "sums", Sums(notes).install)
        lines = [json.loads(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        said = [each for line in lines for each in line["said"]]
        if said:
            return "finding", "; ".join(said)
        if ended is not None or not lines:
            return ended or ("finding", "a private run without a sum")
        what = f"at most {max(line['moved'] for line in lines):.6g} of the bound"
        public = (*words, *PUBLIC)
        if self.refusal(subject, public) is not None:
            return "fine", what
        runs = [
            self.begun(subject, public, name, hide_sums_and_secrets, data)
            for name, data in (("one", DATA), ("other", OTHER))
        ]
        if runs[0] != runs[1]:
            return "finding", f"one data set: {runs[0]}, its neighbour: {runs[1]}"
        if runs[0] is not None:
            return runs[0][0] if runs[0][0] == "finding" else "fine", f"{what}; public: {runs[0][1]}"
        differing = _differing(self.folder / "one", self.folder / "other")
        return ("finding", f"not the same: {differing}") if differing else ("fine", f"{what}; same files")


def _differing(one: Path, other: Path) -> list[str]:
    """Files, but for those of checkpoints, that are not the same in both folders."""
    files = {path.relative_to(folder) for folder in (one, other) for path in folder.rglob("*")}
    released = sorted(path for path in files if path.parts[0] != "checkpoint" and not (one / path).is_dir())
    return [
        str(path)
        for path in released
        if not ((one / path).is_file() and (other / path).is_file())
        or (one / path).read_bytes() != (other / path).read_bytes()
    ]


if __name__ == "__main__":
    conduct(Neighbours, __doc__)
