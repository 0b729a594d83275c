"""Write the model of a finished run as one file for plain PyTorch, which needs nothing of this project.

    python -m benchmarks.predict.export RUN_DIR --output model.pt2

    import torch
    more = {"about.json": ""}
    model = torch.export.load("model.pt2", extra_files=more).module()
    model(images)        # uint8 [N, S, S, 3], N at least 1

The file is a program of torch.export. Its input is a batch of images as the run read them: RGB, squashed to
S x S pixels. The program crops and normalises them as in testing. It returns probabilities [N, K] of labels
or classes, or the class of each pixel, [N, side, side]: what `benchmarks.predict.Trained.predict` returns.
about.json holds S, the K classes, the kind of output, the run's setting and the SHA-256 of its model. Boxes
cannot be exported, as their number depends on the image.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.core.commands import command_parser
from benchmarks.predict.trained import Trained, trained
from dataset.cli import counted, output_file
from dataset.cli import run as run_command
from dataset.files import write_bytes
from dataset.journal import only_writer

ABOUT = "about.json"
CHECKED = (1, 3)
"""Numbers of images with which the written program is compared with the model."""


class Predicting(nn.Module):
    """A model with what makes predictions of its outputs."""

    def __init__(self, model: Trained) -> None:
        super().__init__()
        self.network = model.network

    def forward(self, images: Tensor) -> Tensor:
        """uint8 ``[N, S, S, 3]`` -> predictions, as of `Trained.predict`."""
        return self.network.task.predicted(self.network(images).float())


def exported(model: Trained) -> bytes:
    """The content of the file.

    Raises:
        ValueError: for a model whose predictions are boxes, and for one that torch cannot export.
    """
    directory, size = model.record.directory, model.image_size
    if model.task.outputs == "boxes":
        raise ValueError(
            f"{directory} finds boxes, which torch.export cannot express: use benchmarks.predict"
        )
    whole = Predicting(model).eval()
    draw = torch.Generator().manual_seed(0)
    shape = (size, size, 3)
    inputs = [torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=draw) for n in CHECKED]
    about = {
        "input": f"uint8 [N, {size}, {size}, 3], RGB",
        "image_size": size,
        "output": model.task.outputs,
        "classes": list(model.classes),
        "setting": model.record.config.setting,
        "model_sha256": model.record.outcome.get("model_sha256"),
        "torch": torch.__version__,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about its own internals
        try:
            batch = ({0: torch.export.Dim("N", min=1)},)
            program = torch.export.export(whole, (inputs[-1],), dynamic_shapes=batch)
        except Exception as fault:  # whatever a network makes torch raise
            reason = str(fault).strip().partition("\n")[0][:200]
            raise ValueError(
                f"{directory} has a network that torch.export cannot express ({reason}): use "
                "benchmarks.predict"
            ) from fault
        buffer = io.BytesIO()
        torch.export.save(program, buffer, extra_files={ABOUT: json.dumps(about)})
        again = torch.export.load(io.BytesIO(buffer.getvalue())).module()
    for images in inputs:
        torch.testing.assert_close(again(images), model.predict(images))
    return buffer.getvalue()


def main(argv: Sequence[str]) -> None:
    """The command line."""
    parser = command_parser("predict.export", __doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of a finished run")
    parser.add_argument(
        "--output", "--output_file", type=Path, required=True, metavar="F", help="the file, as model.pt2"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the file --output if it exists")
    options = parser.parse_args(argv or ["--help"])
    output = output_file("--output", options.output, options.overwrite)
    if output.suffix != ".pt2":
        raise ValueError(f"--output {output}: torch.export's files are named .pt2, as model.pt2")
    model = trained(options.run_dir)
    content = exported(model)
    with only_writer(output, options.overwrite, "--output"):
        write_bytes(output, content)
    classes = counted(len(model.classes), "class", "classes")
    print(f"written: {output} ({classes}, images of {model.image_size} pixels)")


if __name__ == "__main__":
    sys.exit(run_command(main))
