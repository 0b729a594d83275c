"""What `benchmarks.doctor.child` found, in plain words: lines to print, and notes of what is not well."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.doctor.note import Note, fault, hint
from benchmarks.doctor.packages import install_command, python_command, reinstall_command

Facts = Mapping[str, Any]
Found = tuple[list[str], list[Note]]
TELL = "open an issue with the report"
DOING = {
    "imports": "importing what a run needs",
    "device": "looking for GPUs",
    "path": "finding out how a run is computed",
    "trial": "the self-test",
    "horovod": "importing Horovod",
}
"""What each stage is about, for a sentence."""


def _build() -> str:
    return f"{python_command()} -m pfl_ext.workers.build_horovod --force"


def _remedy(stage: str) -> str:
    """What to do where a stage's process ends or stands still."""
    remedies = {
        "imports": f"{reinstall_command()} installs them again; if that changes nothing, {TELL}",
        "device": f"see whether nvidia-smi ends, then {TELL}",
        "path": f"--runtime.cpu_kernels false does without compiled layers; {TELL}",
        "trial": f"--runtime.engine stock trains without the engine; {TELL}",
        "horovod": f"{_build()} builds it again; torchrun, the default, needs none",
    }
    return remedies[stage]


def failed(facts: Facts) -> Found:
    """A stage that raised an exception, or a module that cannot be imported."""
    name, why = facts["failed"], facts["why"]
    if name in DOING:
        return [], [fault(f"{DOING[name]} failed ({why}): {TELL}")]
    if name.startswith("benchmarks"):
        return [], [fault(f"the project cannot be imported ({why}): {install_command()}; or else {TELL}")]
    return [], [fault(f"{name} cannot be imported ({why}): {reinstall_command()}")]


def device(facts: Facts, report: Facts) -> Found:
    """The GPUs as torch sees them, beside the driver's."""
    driver, gpus = report["driver"], facts["gpus"]
    built = "no CUDA" if facts["cuda"] is None else f"CUDA {facts['cuda']}"
    if not gpus:
        lines = [f"GPUs for torch, which is built for {built}: none"]
        if not driver:
            return lines, []
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
            return lines, [hint("CUDA_VISIBLE_DEVICES hides the GPU from runs: unset it")]
        what = "install one with CUDA" if facts["cuda"] is None else f"update the driver to one for {built}"
        return lines, [fault(f"torch cannot use the GPU ({facts['why_no_gpu'] or built}): {what}")]
    nccl = "no NCCL" if facts["nccl"] is None else f"NCCL {facts['nccl']}"
    lines, notes = [f"GPUs for torch, which is built for {built} and {nccl}:"], []
    for number, gpu in enumerate(gpus):
        room = f"{gpu['free_gb']:.1f} of {gpu['whole_gb']:.1f} GB are free"
        lines.append(f"  cuda:{number}: {gpu['name']}, {room}{'' if gpu['works'] else ', does not compute'}")
        if not gpu["works"]:
            why = gpu.get("why", "a small product came out wrong")
            notes.append(
                fault(
                    f"cuda:{number} ({gpu['name']}) does not compute ({why}): see nvidia-smi, or choose "
                    "another by --runtime.device"
                )
            )
        elif gpu["free_gb"] < 0.5 * gpu["whole_gb"]:
            notes.append(
                hint(f"more than half of cuda:{number} is in use: end other work there (nvidia-smi)")
            )
    if len(gpus) > 1 and facts["nccl"] is None:
        notes.append(hint(f"torch has no NCCL, so that workers' sums go over the CPU: {install_command()}"))
    return lines, notes


def path(facts: Facts, report: Facts) -> Found:
    """Which way a run goes, and why."""
    notes = []
    gpus = report.get("device", {}).get("gpus", [])
    if facts["on_gpu"]:
        bf16 = "can be" if report["device"].get("bf16") else "is emulated where it is"
        lines = [
            f"device: {facts['device']}, as torch can use it",
            f"layers: {facts['float32']}, in {facts['lanes']} lanes (streams)",
            "CUDA graphs: yes, where they pass the check before the first round (see the self-test)",
            f"precision: float32, the default; bfloat16 {bf16} asked for by --runtime.precision bf16: "
            f"{facts['bf16']}",
        ]
    else:
        lines = [
            f"device: {facts['device']}, as torch can use no GPU"
            if not gpus
            else f"device: {facts['device']}, by PFL_PYTORCH_DEVICE",
            f"layers: {facts['float32']}",
        ]
        if facts["compiled"]:
            lines.append("compiled layers: yes, made for this processor, and they compute what torch does")
        else:
            lines.append(f"compiled layers: no, torch's own, which are slower: {facts['why']}")
            kept = report.get("disk", {}).get("cache", {}).get("writable", True)
            if "no C++ compiler" not in facts["why"] and kept:  # else that is said already
                notes.append(hint(f"layers are torch's own, which are slower: {facts['why']}"))
        lines += [
            _precision(facts),
            "CUDA graphs: no, without a GPU",
            f"users trained at a time (lanes): {facts['lanes']}, threads for torch: {facts['threads']}",
        ]
    workers = f"NP={len(gpus)} starts one for each GPU" if len(gpus) > 1 else "NP=2 starts two"
    lines.append(f"workers: 1, with {facts['readers']} threads that read images; {workers}")
    return lines, notes


def _precision(facts: Facts) -> str:
    """The line about precision on a CPU."""
    start = "precision: float32, the default; "
    if facts["bf16"] == facts["float32"]:
        return start + "bf16 would change nothing, as the processor has no AMX, AVX512-FP16 or AVX512-BF16"
    means = f", as the processor has {facts['feature']}" if facts.get("feature", "none") != "none" else ""
    return f"{start}--runtime.precision bf16 would be {facts['bf16']}{means}"


def trial(facts: Facts) -> Found:
    """One comparison of the self-test."""
    case = facts["case"]
    if facts.get("left_out"):
        return [f"{case}: left out, as the minute was over"], [
            hint(f"the self-test had no time for {case}: try again when the machine does less")
        ]
    if facts.get("begun"):
        return [], []
    off = "not a number" if facts["deviation"] is None else f"{facts['deviation']:.0e}"
    whom, by = f"{facts['users']} users", facts["by"]
    if facts["holds"]:
        way = "" if by is None else f", by {by}"
        lines = [f"{case}: {whom}, deviation {off} of at most {facts['limit']:.0e}{way}"]
        if facts["path"] == 0:
            return lines, []
        why = "; ".join(failure["why"] for failure in facts["failures"])
        return lines, [hint(f"{case}: runs take the slower way '{by}' here by themselves ({why}): {TELL}")]
    why = facts["failures"][-1]["why"] if facts["failures"] else "no reason"
    return [f"{case}: does not hold: {why}"], [
        fault(
            f"{case}: the engine does not compute what pfl's loop does ({why}): train by "
            f"{_instead(facts['device'], case)}, and {TELL}"
        )
    ]


def _instead(where: str, case: str) -> str:
    if where != "CPU":
        return "pfl's loop, as runs do here by themselves"
    return "--runtime.engine stock" if "without" in case else "--runtime.cpu_kernels false if that case holds"


def horovod(facts: Facts, report: Facts) -> Found:
    """Whether Horovod can be used, and what carries its sums."""
    if "why" in facts:
        return ["Horovod: installed, but it cannot be imported"], [
            fault(f"Horovod cannot be imported ({facts['why']}): {_build()} builds it for this torch")
        ]
    built, gpus = facts["built_with"], report.get("device", {}).get("gpus", [])
    lines = [f"Horovod: {facts['version']}, built with {', '.join(built) or 'nothing'}"]
    if len(gpus) > 1 and "nccl" not in built:
        return lines, [
            hint(
                f"Horovod was built without NCCL: install CUDA's toolkit (nvcc), then {_build()}, or keep to "
                "torchrun"
            )
        ]
    return lines, []


def ended(stage: str, how: str, output: list[str]) -> Note:
    """A stage that did not come to its end."""
    last = next((line.strip() for line in reversed(output) if line.strip()), "")
    said = f"; its last line: {last[:200]}" if last else ""
    return fault(f"{DOING[stage]} did not end well, {how}{said}: {_remedy(stage)}")
