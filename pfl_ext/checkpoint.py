"""One atomic file from which a run goes on as if it had never stopped. Nothing is pickled."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file so that its name always holds either the old content or all of the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """`write_bytes` of indented JSON; NaN is refused."""
    write_bytes(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def save(path: Path, tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> None:
    """Write tensors and a JSON state into one safetensors file, atomically.

    :raises OSError: when the disk is full, say; what the file held before is whole then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(contiguous, temporary, metadata={"state": json.dumps(dict(state), allow_nan=False)})
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # safetensors makes files that only their owner can read
        os.replace(temporary, path)
    except SafetensorError as fault:  # an I/O error in safetensors' clothes
        raise OSError(f"{path} cannot be written: {fault}") from fault
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `save` wrote.

    :raises ValueError: when the file is not a whole checkpoint.
    """
    try:
        with safe_open(path, framework="pt") as file:
            state = json.loads((file.metadata() or {})["state"])
            return {name: file.get_tensor(name) for name in file.keys()}, state  # noqa: SIM118
    except (SafetensorError, KeyError, json.JSONDecodeError) as damage:
        raise ValueError(f"{path} is not a whole checkpoint ({damage}); remove it to start anew") from damage


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
    """Put back what `optimizer_tensors` gave; parameter groups keep their settings."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split("/")
        state.setdefault(int(number), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
