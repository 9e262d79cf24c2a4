"""Processes that compile kernels for a worker: in threads most of the work would wait for Python's lock.

A worker forks the first process at its beginning, before it has threads and a CUDA context, as a fork is safe
only then. This process imports Triton and the kernels, and waits. For the first kernel that is not in
the cache on disk it forks the others. Each of them takes one job after the other from the same socket,
compiles a kernel to the cache, and answers; the worker then loads it from there. When the worker ends or is
killed, the kernel ends them. When one of them ends, all do, and the worker goes on alone.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import pkgutil
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from inspect import getclosurevars
from pathlib import Path
from typing import Any

from segue.host import end_with_parent
from segue.logs import logger

_MOST_BYTES = 1 << 17  # of a job; the longest ones have 4 KB


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One variant of a kernel, as another process can compile it."""

    module: str
    name: str  # of the kernel, in the module
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attrs: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: Any


class CompileProcesses:
    """The processes of one worker. Any of its threads may use them."""

    def __init__(self, connection: socket.socket, pid: int, count: int) -> None:
        """Take what :meth:`fork` has made."""
        self.pid = pid  # of the first process
        self.count = count  # of those that compile
        self._connection = connection
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[bool]] | None = {}  # by the number of the job; None: they have ended
        self._count = 0
        self._receiver: threading.Thread | None = None

    @classmethod
    def fork(cls, count: int, work: Callable[[Variant], None] | None = None) -> CompileProcesses:
        """Fork the first process, which makes itself `count` when there is work; `work` does one job.

        Call it where no other thread runs Python, and where there is no CUDA context.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        with warnings.catch_warnings():  # libraries of numpy have threads, which are made for forks
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                _serve(theirs, parent, count, work)
            except BaseException as error:
                logger.debug("no process compiles kernels: %r", error)
            finally:
                os._exit(1)
        theirs.close()
        return cls(ours, pid, count)

    def compile(self, job: Variant) -> bool:
        """Compile a kernel to the cache on disk; False: the caller has to do it, and learns why it fails."""
        done: Future[bool] = Future()
        with self._lock:
            if self._waiting is None:
                return False
            if self._receiver is None:
                self._receiver = threading.Thread(target=self._receive, name="segue-compiled", daemon=True)
                self._receiver.start()
            number, self._count = self._count, self._count + 1
            self._waiting[number] = done
        try:
            self._connection.send(pickle.dumps((number, job)))
        except Exception as error:  # they have ended, or the job is too long, or has what cannot be sent
            logger.debug("no other process compiles %s.%s: %r", job.module, job.name, error)
            return False
        return done.result()

    def close(self) -> None:
        """End the processes; jobs that they have are left to the callers."""
        self._end()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        with suppress(ProcessLookupError, ChildProcessError):  # where SIGCHLD is ignored, it may be gone
            os.kill(self.pid, signal.SIGTERM)  # it ends the others, and waits for them
            os.waitpid(self.pid, 0)
        if self._receiver is not None:
            self._receiver.join()
        self._connection.close()

    def _receive(self) -> None:
        """Hand on the answers, until the processes have ended."""
        with suppress(OSError):
            while answer := self._connection.recv(_MOST_BYTES):
                number, is_done = pickle.loads(answer)
                with self._lock:
                    done = None if self._waiting is None else self._waiting.pop(number, None)
                if done is not None:
                    done.set_result(is_done)
        self._end()

    def _end(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, None
        for done in (waiting or {}).values():
            done.set_result(False)


def can_compile() -> bool:
    """Return whether this machine has what kernels are compiled for, without asking the driver."""
    return find_spec("triton") is not None and any(Path("/dev").glob("nvidia[0-9]*"))


def import_triton() -> None:
    """Import Triton, have its part of the driver compiled, and its key computed: it hashes 400 MB of itself.

    A thread does it while another one imports torch. What fails here fails again where it is needed.
    """
    with suppress(Exception):
        from triton.backends.nvidia.driver import CudaUtils
        from triton.runtime.cache import triton_key

        triton_key()
        CudaUtils()


def import_kernels() -> None:
    """Import all kernels; Triton reads the source of each, so it takes 0.2 s."""
    import segue.kernels.triton as package

    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


def missing_variant(compile: Callable[[], Any]) -> Variant | None:
    """Return the job of what Triton wants to be called in order to compile.

    None: it is in the cache on disk, or the caller has to do it, as this version of Triton is another one.
    """
    try:
        return _missing_variant(**getclosurevars(compile).nonlocals)
    except Exception as error:  # if it is another one, the caller meets it, too
        logger.debug("no process compiles kernels, as Triton's compiler is an unknown one: %r", error)
        return None


def _missing_variant(src: Any, options: Any, target: Any, env_vars: Any, **_: Any) -> Variant | None:
    from triton.compiler import make_backend
    from triton.runtime.cache import get_cache_key, get_cache_manager

    key = get_cache_key(src, make_backend(target), options, env_vars)
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    if cache.get_file(f"{src.name[:150]}.json") is not None:
        return None
    function = src.fn.fn
    return Variant(
        module=function.__module__,
        name=function.__qualname__,
        signature=src.signature,
        constants=src.constants,
        attrs=src.attrs,
        options=dict(options.__dict__),
        target=target,
    )


def compile_variant(job: Variant) -> None:
    """Compile a kernel to the cache on disk, and the C code that launches it, where there is some."""
    import triton
    from triton.backends.nvidia import driver
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(job.module), job.name)
    source = ASTSource(function, job.signature, job.constants, job.attrs)
    kernel = triton.compile(source, target=job.target, options=job.options)
    if hasattr(driver, "make_launcher"):  # newer versions have no code per kernel, and would ask the device
        with suppress(Exception):  # the worker does it when it loads the kernel, and tells of the error
            driver.CudaLauncher(kernel.src, kernel.metadata)


def _serve(
    connection: socket.socket, parent: int, count: int, work: Callable[[Variant], None] | None
) -> None:
    """What the first process does; it does not return."""
    end_with_parent()
    for number in (signal.SIGTERM, signal.SIGCHLD):  # whoever started the worker may ignore or block them
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if os.getppid() != parent:
        os._exit(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # standard input is the worker's lifeline
    if work is None:
        work = compile_variant
        import_kernels()
    if not connection.recv(1, socket.MSG_PEEK):  # it waits for work, and there was none
        os._exit(0)
    first = os.getpid()
    pids: set[int] = set()
    signal.signal(signal.SIGTERM, lambda *_: _end_all(pids))
    for _ in range(count):
        if (pid := _fork()) == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            end_with_parent()
            if os.getppid() != first:
                os._exit(0)
            _work(connection, work)
        if pid is None:
            break  # the others do the work
        pids.add(pid)
    pids.remove(os.wait()[0])  # none of them ends by itself before the worker has closed the connection
    _end_all(pids)


def _fork() -> int | None:
    """Fork; None: there are too many processes."""
    try:
        return os.fork()
    except OSError as error:
        logger.debug("fewer processes compile kernels: %s", error)
        return None


def _end_all(pids: Iterable[int]) -> None:
    """Kill these children, wait for all, and end: in a container nobody else might ever wait for them."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    os._exit(1)


def _work(connection: socket.socket, work: Callable[[Variant], None]) -> None:
    """Do jobs until the worker has ended."""
    while message := connection.recv(_MOST_BYTES):
        number, job = pickle.loads(message)
        try:
            work(job)
            is_done = True
        except Exception as error:  # the worker tries it, too, and tells of its own
            logger.debug("a process could not compile %s.%s: %r", job.module, job.name, error)
            is_done = False
        connection.send(pickle.dumps((number, is_done)))
    os._exit(0)
