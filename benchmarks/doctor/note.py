"""What is not well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Note:
    """One thing that is not well, and what to do about it, in one line."""

    text: str
    is_fault: bool = False
    """Whether runs fail or compute something wrong, or a device stands idle; else they are only slower."""

    def __str__(self) -> str:
        return f"{'fault' if self.is_fault else 'hint'}: {self.text}"


def fault(text: str) -> Note:
    """What must be repaired."""
    return Note(text, is_fault=True)


def hint(text: str) -> Note:
    """What can be better."""
    return Note(text)
