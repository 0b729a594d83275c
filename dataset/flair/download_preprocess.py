"""Download FLAIR, or take a local copy, and make one HDF5 file of it.

    python -m dataset.flair.download_preprocess --output_file F [--source hf|apple|DIR] [--storage jpeg|raw]

A download or a preprocessing that was killed, stopped by SIGTERM, SIGINT (Ctrl-C) or SIGUSR1 (exit code 75),
or lost the network, continues with the same command. Downloads, and each block of 2,048 images that was
checked or written, are kept in F.partial until the output is complete.

--verify full, the default, strictly decodes every image to the end of its stream. So damage is found now, and
not after days of training, or never, since most decoders hide it. For all of FLAIR it takes a few minutes on
two cores, once. --verify header reads only headers and end markers, which finds files that are cut off or are
no images. With --storage raw every image is decoded anyway, in the second pass.

PNG, WebP, GIF, BMP and TIFF images become JPEGs of --jpeg_quality (or pixels, with --storage raw).
Transparent images are laid over --background, 16 bits become 8, and of an animation the first frame is
taken. The counts are printed and recorded in the file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dataset.cli import input_file, run
from dataset.fetch.source import Source
from dataset.flair import sources
from dataset.journal import only_downloader
from dataset.preprocess import UPRIGHT, Options, checked_places, command_parser, make
from dataset.store.images import BACKGROUNDS, Transcoding
from dataset.store.index import TAXONOMIES


def read_vocabulary(path: Path) -> dict[str, list[str]]:
    """The names of each taxonomy from JSON ``{"labels": [...], ...}``, or from {name: anything} for each."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--label_mapping {path} is not valid JSON ({error})") from None
    if not isinstance(content, dict) or not content or set(content) - set(TAXONOMIES):
        raise ValueError(
            f"--label_mapping {path} must be a JSON object with the keys {' and '.join(TAXONOMIES)}"
        )
    for taxonomy, names in content.items():
        if not isinstance(names, (list, dict)) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"--label_mapping {path}: {taxonomy} must be a list of names or an object")
    return {taxonomy: sorted(set(names)) for taxonomy, names in content.items()}


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_parser("flair", __doc__)
    add = parser.add_argument
    add("--source", default="hf", help="hf: apple/flair on Hugging Face; apple: Apple's; or a folder")
    add("--not_group_data_by_user", action="store_true", help="keep the source's order (centralised)")
    add(
        "--jpeg_quality", type=int, default=95, help="quality of JPEGs made from PNG, WebP, GIF, BMP and TIFF"
    )
    add("--upright", action="store_true", help=UPRIGHT)
    add("--background", choices=BACKGROUNDS, default="white", help="below transparent images")
    bad = "skip leaves them out and lists them"
    add("--on_bad_image", choices=("fail", "skip"), default="fail", help=bad)
    labels = "JSON that fixes the labels: {labels: [], fine_grained_labels: []}"
    add("--label_mapping", type=Path, help=labels)
    add("--revision", help=f"commit, for --source hf ({sources.REVISION})")
    return parser.read(argv)


def main(argv: Sequence[str]) -> None:
    """The command line."""
    arguments = _arguments(argv)
    _, folder = checked_places(arguments)
    if arguments.revision is not None and arguments.source != "hf":
        raise ValueError("--revision can be used only with --source hf: leave it out")
    if arguments.download_folder is not None and arguments.source not in ("hf", "apple"):
        raise ValueError("--download_folder can be used only with --source hf or apple: leave it out")
    if arguments.label_mapping is not None:
        input_file("--label_mapping", arguments.label_mapping)
    options = Options.of(
        arguments,
        "flair",
        grouped=not arguments.not_group_data_by_user,
        vocabulary=read_vocabulary(arguments.label_mapping) if arguments.label_mapping else None,
        transcode=Transcoding(arguments.jpeg_quality, arguments.background, arguments.upright),
    )
    source: Source
    with only_downloader(arguments.download_folder):
        if arguments.source == "hf":
            source = sources.hugging_face(folder, arguments.revision or sources.REVISION)
        elif arguments.source == "apple":
            source = sources.apple(folder)
        else:
            source = sources.local(Path(arguments.source))
        make(source, options, folder)


if __name__ == "__main__":
    sys.exit(run(main))
