"""The variables that stay with each user, and how they are chosen."""

from __future__ import annotations

from torch import nn

from pfl_ext.models.trained import new_part, of_norms

FILE = "personal.f32"
"""Name of the file with the users' values, beside a run's checkpoints."""
BACKBONE = "backbone."
"""Prefix of the names of a classifier's variables."""


def trained_names(module: nn.Module) -> list[str]:
    """The variables that training changes, in their order."""
    return [name for name, p in module.named_parameters() if p.requires_grad]


def personal_names(module: nn.Module, personal: str | None) -> list[str]:
    """The trained variables of a classifier that stay with the user, in their order.

    Args:
        module: an `ImageClassifier`.
        personal: ``head`` is the last layer and a bottleneck or decoder before it. ``norms`` is scale and
            shift of every norm, found by the type of the layer. ``all`` is every variable. Other text is a
            list of prefixes of names, separated by commas, with or without ``backbone.``. None: no variable.

    Raises:
        ValueError: one line, when no trained variable is selected.
    """
    names = trained_names(module)
    if personal is None:
        return []
    if personal == "all":
        return names
    backbone = module.get_submodule(BACKBONE[:-1])
    if personal == "norms":
        norms = {BACKBONE + name for name, _ in of_norms(backbone)}
        found = [name for name in names if name in norms]
        if not found:
            raise ValueError(
                "no norm layer of this network is trained, so none can be personal: choose a "
                "model.arch with norm layers, and set model.trained to all or norms"
            )
        return found
    head = new_part(backbone)
    wanted = [f"{head}." if head else ""] if personal == "head" else personal.split(",")
    chosen = set[str]()
    for beginning in (word.strip().removeprefix(BACKBONE) for word in wanted):
        found = [name for name in names if name.removeprefix(BACKBONE).startswith(beginning)]
        if not found or (personal != "head" and not beginning):
            shown = ", ".join(name.removeprefix(BACKBONE) for name in names[:4])
            raise ValueError(
                f"federated.options.personal is {personal}, but no trained variable begins with "
                f"{beginning or 'nothing'!r}: choose head, norms, all, none, or beginnings of names "
                f"({shown}, ...)"
            )
        chosen.update(found)
    return [name for name in names if name in chosen]
