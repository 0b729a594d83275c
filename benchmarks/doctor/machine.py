"""What this machine has, as far as it can be found with nothing installed.

Nothing here imports torch or pfl, which may be missing or end the process: `benchmarks.doctor.child` does.
Each function gives the lines to print and the notes, and puts what it found into the report.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.doctor.note import Note, fault, hint
from dataset.cli import cores, output_folder
from pfl_ext.engine.cpu.build import compiler
from pfl_ext.processor import cache_folder, processor, processor_model

FEATURES = {
    "avx2": "AVX2", "fma": "FMA", "avx512f": "AVX-512", "avx512_fp16": "AVX512-FP16",
    "avx512_bf16": "AVX512-BF16", "amx_bf16": "AMX",
}  # fmt: skip
"""Flags of a processor that decide how the compiled layers are made, and their names."""
MEMORY_GB, DISK_GB, CACHE_GB = 4.0, 10.0, 0.1
"""Below so much free memory, or space for data and runs, or for the cache, there is a hint."""
OTHER_PLACES = {
    "data": "a file elsewhere is named by --data_path, and by --output_file where it is made",
    "runs": "name another place by --run_dir",
    "cache": "set XDG_CACHE_HOME to a folder of your own",
}
"""What to do where nothing can be written."""
Found = tuple[list[str], list[Note]]
"""Lines to print, and notes."""


def hardware(report: dict[str, Any]) -> Found:
    """The processor, with what of it the compiled layers look for, and the memory."""
    flags = set(processor().split())
    features = [name for flag, name in FEATURES.items() if flag in flags]
    free, whole = memory_gb()
    report["processor"] = {"model": processor_model(), "cores": cores(), "features": features}
    report["memory_gb"] = {"free": free, "whole": whole}
    has = ", ".join(features) or "no AVX2"
    lines = [
        f"processor: {processor_model()} with {has}; cores for this process: {cores()}",
        f"memory: {free:.1f} of {whole:.1f} GB are free" if whole else "memory: unknown",
    ]
    little = whole and free < MEMORY_GB
    return lines, [
        hint(f"only {free:.1f} GB of memory are free: use fewer --runtime.lanes, and --runtime.cache_gb 1")
    ] if little else []


def memory_gb() -> tuple[float, float]:
    """Free and whole, of the machine or, where it has less, of the control group; 0: unknown."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="utf-8")
        free, whole = (
            int(re.findall(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)[0]) / 1e6
            for name in ("MemAvailable", "MemTotal")
        )
    except (OSError, IndexError):
        return 0.0, 0.0
    group = Path("/sys/fs/cgroup")
    try:
        most, used = (
            int((group / name).read_text(encoding="utf-8")) / 1e9 for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # no control group, or one without a limit
        return free, whole
    return min(free, max(most - used, 0.0)), min(whole, most)


def gpus(report: dict[str, Any]) -> Found:
    """What NVIDIA's driver says; whether torch can use it is found later."""
    found: list[str] = []
    program = shutil.which("nvidia-smi")
    command = [program or "", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    if program is not None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            found = done.stdout.splitlines() if done.returncode == 0 else []
        except (OSError, subprocess.SubprocessError):
            found = []
    if not found:
        found = [f"NVIDIA {path.name}" for path in Path("/proc/driver/nvidia/gpus").glob("*")]
    report["driver"] = found
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "none" if not found else "; ".join(found)
    lines = [f"GPUs by the driver: {shown}" + ("" if hidden is None else f"; CUDA_VISIBLE_DEVICES={hidden}")]
    return lines, []


def compilers(report: dict[str, Any]) -> Found:
    """The C++ compiler that the compiled layers and Horovod are made with."""
    program, asked = compiler(), os.environ.get("CXX")
    notes = []
    if asked is not None and shutil.which(asked) is None:
        notes.append(
            hint(f"CXX is {asked}, which is no program here: unset CXX, or let it name a C++ compiler")
        )
    version = None
    if program is not None:
        try:
            done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
            version = next(iter(done.stdout.splitlines()), "")
        except (OSError, subprocess.SubprocessError):
            version = "does not start"
    report["compiler"] = {"program": program, "version": version}
    if program is None:
        notes.append(
            hint(
                "no C++ compiler (g++ or clang++): training on a CPU takes about twice as long, and Horovod "
                "cannot be built: apt-get install g++"
            )
        )
        return ["C++ compiler: none"], notes
    return [f"C++ compiler: {program} ({version})"], notes


def disks(report: dict[str, Any]) -> Found:
    """Whether there is room, and leave to write, where data, runs and the cache lie."""
    lines, notes, report["disk"] = [], list[Note](), {}
    places = {"data": Path("data"), "runs": Path("runs")}
    if (cache := cache_folder()) is not None:
        places["cache"] = cache
    else:
        notes.append(
            hint("there is no home folder to keep compiled layers in: set XDG_CACHE_HOME to a folder")
        )
    for name, path in places.items():
        exists = next(place for place in (path, *path.absolute().parents) if place.exists())
        free = shutil.disk_usage(exists).free / 1e9
        entry: dict[str, Any] = {"path": str(path), "free_gb": round(free, 1), "writable": True}
        report["disk"][name] = entry
        lines.append(f"disk for {name} ({path}): {free:.0f} GB are free")
        try:
            output_folder("the folder", path)
        except ValueError as refusal:
            entry["writable"] = False
            lines[-1] += ", but nothing can be written there"
            why = str(refusal).removesuffix("; choose another path")
            notes.append((fault if name == "runs" else hint)(f"{why}: {OTHER_PLACES[name]}"))
        if free < (CACHE_GB if name == "cache" else DISK_GB):
            flair = "; FLAIR takes 6" if name == "data" else ""
            notes.append(hint(f"only {free:.1f} GB of disk are free for {name} ({path}){flair}"))
    return lines, notes
