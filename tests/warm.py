"""Run a module in a new process that has torch and the training code imported already.

A fresh interpreter spends five seconds of CPU time on these imports, more than most runs of the tests. Here
one server imports them once, when it is first asked, and forks for each command (`server`). The client is
what a test or a launcher starts in place of ``python -m MODULE WORDS...``:

    python tests/warm.py MODULE WORDS...

It hands its environment, directory and streams to the new process, passes signals on to it, and ends as it
ends: with the same exit code, or by the same signal. If the client is killed, the process is killed. The
process runs with the client's variables. If one that is read only at a start (`READ_AT_START`) differs from
the server's, the process becomes a fresh interpreter. All forked processes share one seed of string hashes:
what must not depend on the order of a set is tested in fresh interpreters.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

SERVER = "WARM_SERVER"
"""The environment variable that holds the server's address."""
ACCOUNT = "WARM_ACCOUNT"
"""The environment variable that holds the path of the caller's `account`."""
MODULES = (
    "benchmarks.flair.train",
    "benchmarks.visual_classification.train",
    "benchmarks.reporting.plots",
    "pytest",
    "torch.distributed.run",
    "horovod.torch",
    "horovod.runner.launch",
)
"""What the server imports; without Horovod, all but its modules."""
READ_AT_START = (
    *("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_"),
    *("ATEN_", "ONEDNN_", "DNNL_", "CUDA_"),
)
"""How variables begin that Python, torch or its libraries read once: a forked process would ignore them."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT)
LOST_SERVER = 70
STATUS_BYTES, LENGTH_BYTES = 2, 4


class Request(NamedTuple):
    """What a client asks for."""

    module: str
    words: list[str]
    directory: str
    environment: dict[str, str]


def client(module: str, *words: str) -> int:
    """Have a module run by the server; its exit code, unless a signal ended it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ[SERVER])
        for number in PASSED_ON:
            signal.signal(number, lambda sent, _: connection.sendall(bytes([sent])))
        text = json.dumps(Request(module, list(words), str(Path.cwd()), dict(os.environ))).encode()
        socket.send_fds(connection, [len(text).to_bytes(LENGTH_BYTES, "big")], [0, 1, 2])
        connection.sendall(text)
        answer = connection.recv(STATUS_BYTES, socket.MSG_WAITALL)
    code = int.from_bytes(answer, "big", signed=True) if answer else LOST_SERVER
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


class Forks:
    """The server's processes: one for each client that waits."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._selector = listener, selectors.DefaultSelector()
        self._clients: dict[int, tuple[int, socket.socket, str | None]] = {}
        self._selector.register(listener, selectors.EVENT_READ, self._fork)
        self._selector.register(0, selectors.EVENT_READ, self._leave)

    def serve(self) -> Request:
        """Fork until the standard input ends; returns in each new process, with what it shall run."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj in self._selector.get_map():
                    request: Request | None = key.data()
                    if request is not None:
                        return request

    def _fork(self) -> Request | None:
        connection, _ = self._listener.accept()
        head, streams, _, _ = socket.recv_fds(connection, LENGTH_BYTES, 3)
        content = connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
        request = Request(*json.loads(content))
        process = os.fork()
        if process == 0:
            os.setsid()
            for descriptor, stream in enumerate(streams):
                os.dup2(stream, descriptor)
        for stream in streams:
            os.close(stream)
        if process == 0:
            connection.close()
            self._forget_all()
            return request
        ended = os.pidfd_open(process)
        self._clients[ended] = process, connection, request.environment.get(ACCOUNT)
        self._selector.register(ended, selectors.EVENT_READ, functools.partial(self._answer, ended))
        self._selector.register(connection, selectors.EVENT_READ, functools.partial(self._signal, ended))
        return None

    def _signal(self, ended: int) -> None:
        """Pass a signal on; a client that is gone takes its process with it."""
        process, connection, _ = self._clients[ended]
        try:
            sent = connection.recv(1)
        except ConnectionError:
            sent = b""
        os.kill(process, sent[0] if sent else signal.SIGKILL)
        if not sent:
            self._selector.unregister(connection)

    def _answer(self, ended: int) -> None:
        process, connection, account = self._clients.pop(ended)
        self._selector.unregister(ended)
        if connection in self._selector.get_map():
            self._selector.unregister(connection)
        _, status, used = os.wait4(process, 0)
        code = os.waitstatus_to_exitcode(status)
        if account is not None:
            with contextlib.suppress(FileNotFoundError):  # the caller has ended
                file = os.open(account, os.O_WRONLY | os.O_APPEND)
                os.write(file, f"{used.ru_utime + used.ru_stime}\n".encode())
                os.close(file)
        with connection, contextlib.suppress(ConnectionError):  # the client may have been killed
            connection.sendall(code.to_bytes(STATUS_BYTES, "big", signed=True))
        os.close(ended)

    def _leave(self) -> None:
        for process, *_ in self._clients.values():
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        os._exit(0)

    def _forget_all(self) -> None:
        """In a new process: close what belongs to the server."""
        for ended, (_, connection, _) in self._clients.items():
            os.close(ended)
            connection.close()
        self._selector.close()
        self._listener.close()


def read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of `READ_AT_START`."""
    return {key: value for key, value in environment.items() if key.startswith(READ_AT_START)}


def name_methods_by_frames() -> None:
    """torchrun asks `inspect` for its whole stack where it only wants the name of one method.

    For each frame of a module that is not imported by name, as the one that runs here is not, `inspect` goes
    through all modules: a second for each launch.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def name(depth: int = 2) -> str:
        return sys._getframe(depth).f_code.co_name

    dynamic_rendezvous.get_method_name = name


def serve(address: str) -> None:
    """Be the server until the standard input ends."""
    at_start = read_at_start(os.environ)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        os.write(1, b"ready\n")
        either: list[socket.socket | int] = [listener, 0]
        if 0 in select.select(either, [], [])[0]:
            return  # nobody has asked
        gc.disable()
        import numpy

        for module in MODULES:
            try:
                importlib.import_module(module)
            except ModuleNotFoundError as missing:
                if missing.name != "horovod":
                    raise
        from benchmarks.flair.config import parse
        from benchmarks.flair.paper import variant

        config = parse([]).config  # imports all that a config may name: algorithms, networks, data sets
        variant(config)  # parses the shipped settings, half of the time of a small run
        name_methods_by_frames()
        from dataset.store import probe
        from tests.campaigns.probe_server import survives

        probe._dies_of = lambda path: not survives(path)  # a fork, not an interpreter of its own
        os.fsync = os.fstat  # type: ignore[assignment]  # as in the tests' own processes
        gc.freeze()  # a collection in a new process would copy all that the processes share
        gc.enable()
        request = Forks(listener).serve()
    os.chdir(request.directory)
    if read_at_start(request.environment) != at_start:
        words = [sys.executable, "-m", request.module, *request.words]
        os.execve(sys.executable, words, request.environment)
    os.environ.clear()
    os.environ.update(request.environment)
    numpy.random.seed()  # noqa: NPY002  each new interpreter has another state, too
    sys.argv = [request.module, *request.words]
    sys.modules.pop(request.module, None)  # it runs as __main__
    code = 0
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # clearing the modules away, as at the end of an interpreter, takes over a second


ADDRESSES: dict[tuple[tuple[str, str], ...], str] = {}
"""Addresses of the servers that this process started, by the variables that matter to them."""


def server(environment: Mapping[str, str]) -> str:
    """Start the server with these variables, or find one with the same `READ_AT_START`, or an outer one.

    Returns:
        Its address. A server that was started here ends with this process.
    """
    if SERVER in os.environ:
        return os.environ[SERVER]
    key = tuple(sorted(read_at_start(environment).items()))
    if key not in ADDRESSES:
        ADDRESSES[key] = _started(environment)
    return ADDRESSES[key]


def _started(environment: Mapping[str, str]) -> str:
    folder = tempfile.TemporaryDirectory(prefix="warm")
    address = str(Path(folder.name) / "socket")
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.warm", "--serve", address],
        cwd=Path(__file__).parent.parent,
        env=dict(environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def stop() -> None:
        process.communicate()
        folder.cleanup()

    atexit.register(stop)
    return address


@functools.cache
def account() -> Path:
    """The file of this process in which servers note the CPU time of each process that they ran for it."""
    folder = tempfile.TemporaryDirectory(prefix="warm")
    atexit.register(folder.cleanup)
    file = Path(folder.name) / "seconds"
    file.touch()
    return file


def cpu_seconds() -> float:
    """CPU time of the processes that servers ran for this one, and that have ended."""
    return sum(map(float, account().read_text().split()))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(sys.argv[2])
    else:
        sys.exit(client(*sys.argv[1:]))
