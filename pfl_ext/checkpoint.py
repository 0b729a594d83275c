"""Checkpoints: one file, written atomically, from which a run continues as if it had never stopped.

A checkpoint is a safetensors file whose metadata hold a JSON state and a SHA-256 over state and tensors;
nothing is pickled. It is written beside the old one, flushed to the disk, read back and compared before it
takes the name. The old one is kept as ``NAME.previous`` until the next, and is loaded if the newest is
damaged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pfl.model.pytorch import PyTorchModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dataset.files import HALF_WRITTEN, locked, replacing, sync, written

INNER = ("checkpoint", "plots")
"""The folders in a run's directory that belong to the run."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object that `dataset.files.write_json` wrote.

    Raises:
        ValueError: when the file holds no JSON object; the message names the file.
    """
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as damage:
        raise ValueError(f"{path} is damaged ({damage}): restore it, or choose another --run_dir") from damage
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (no JSON object): restore it, or choose another --run_dir")
    return content


def previous(path: Path) -> Path:
    """The path of the checkpoint before the newest."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def _checksum(tensors: Mapping[str, torch.Tensor], state: str) -> str:
    """SHA-256 over the state and every tensor's name, type, shape and bytes."""
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, each with memory of its own, as safetensors needs it."""
    apart: dict[str, torch.Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if tensor.numel() and place in taken else tensor
        taken.add(place)
    return apart


def save(
    path: Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any], keep_previous: bool = False
) -> None:
    """Write tensors and a JSON state into one safetensors file, atomically, and read it back.

    Args:
        keep_previous: whether to keep the old file as `previous`.

    Raises:
        OSError: for example when the disk is full; the old file is then unchanged.
    """
    contiguous = _apart({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
    text = json.dumps(dict(state), allow_nan=False)
    # In one entry: safetensors writes several in any order, and the same content must be the same bytes.
    metadata = {"checkpoint": json.dumps([text, _checksum(contiguous, text)])}
    try:
        with replacing(path) as temporary:
            save_file(contiguous, temporary, metadata=metadata)
            sync(temporary)
            load(temporary)
            if keep_previous and path.exists():
                _keep(path)
        with written(path):
            sync(path.parent)
    except (SafetensorError, ValueError) as fault:  # safetensors' own I/O error, or what `load` says
        raise OSError(f"{path} cannot be written: {fault}") from fault


def _keep(path: Path) -> None:
    """Give the file a second name. With hard links, the first name always has a file."""
    link = path.with_name(f".{path.name}.{os.getpid()}.link.partial")
    try:
        os.link(path, link)
    except OSError:
        os.replace(path, previous(path))
    else:
        os.replace(link, previous(path))
        link.unlink(missing_ok=True)  # if both names have one file already, replace does nothing


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read the tensors and the state that `save` wrote.

    Raises:
        ValueError: when the file is not a whole checkpoint.
    """
    try:
        with safe_open(path, framework="pt") as file:
            text, digest = json.loads((file.metadata() or {})["checkpoint"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _checksum(tensors, str(text)) != digest:
            raise ValueError("its checksum does not agree")
        return tensors, json.loads(text)
    except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as damage:
        raise ValueError(f"{path} is not a whole checkpoint ({damage})") from damage


def load_newest(
    path: Path, damage: str | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any], str | None]:
    """The newest undamaged checkpoint of a name, and a sentence if that is not the last one.

    Args:
        damage: why the last one is not to be used, although its file is whole; None: it may be used.

    Raises:
        ValueError: when the last one and the one before are both damaged.
    """
    try:
        if damage is None and path.exists():
            return *load(path), None
        damage = damage or f"{path} is missing"
    except ValueError as fault:
        damage = str(fault)
    try:
        tensors, state = load(previous(path))
    except (ValueError, OSError):
        raise ValueError(f"{damage}, nor is there one before it: choose another --run_dir") from None
    return tensors, state, f"{damage}: going on from the one before it, {previous(path)}"


def _remove_half_written(directory: Path) -> None:
    for folder in (directory, *(directory / name for name in INNER)):
        for pattern in HALF_WRITTEN:
            for dead in folder.glob(pattern):
                dead.unlink(missing_ok=True)


@contextlib.contextmanager
def sole_owner(directory: Path) -> Iterator[None]:
    """Lock a directory for this process, on file systems with locks; the lock of a killed process is gone.

    Half-written files of killed processes are removed from the directory and its folders `INNER`. Other
    folders in it may be directories of other owners.

    Raises:
        ValueError: when another process has the lock.
        OSError: one clause with the path, for example on a read-only file system.
    """
    refusal = f"{directory} is in use by another process: wait for its end, or choose another directory"
    with contextlib.ExitStack() as stack:
        with written(directory):
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(directory / ".lock", refusal))
        _remove_half_written(directory)
        yield
        _remove_half_written(directory)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimiser's state as named tensors, ``<parameter number>/<state name>``."""
    state = optimizer.state_dict()["state"]
    return {
        f"{number}/{name}": torch.as_tensor(value)
        for number, entries in state.items()
        for name, value in entries.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore the state from `optimizer_tensors`. Parameter groups keep their settings."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split("/")
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


CHECKPOINTS = 3
"""How many of a run there are at once: the last, the one before it, and the one that is being written."""
MODEL, SERVER = "model/", "optimizer/"
"""Prefixes of names in a checkpoint: of a model's tensors, and of its optimiser's."""


def part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The tensors of one part of a checkpoint, without its prefix."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def model_tensors(model: PyTorchModel) -> dict[str, torch.Tensor]:
    """The tensors of a model and its central optimiser."""
    parts = {MODEL: model.pytorch_model.state_dict(), SERVER: optimizer_tensors(model._central_optimizer)}
    return {prefix + name: tensor for prefix, named in parts.items() for name, tensor in named.items()}


def restore_model(model: PyTorchModel, tensors: Mapping[str, torch.Tensor]) -> None:
    """Restore a model and its central optimiser from `model_tensors`."""
    model.pytorch_model.load_state_dict(part(tensors, MODEL))
    restore_optimizer(model._central_optimizer, part(tensors, SERVER))
