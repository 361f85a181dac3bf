"""A Python whose imports are already made, for tests that start processes of their own: ``python`` is its drop-in.

To import Lightning and torch takes a process several seconds, which is more than most of the runs of the tests. One
server imports them once. ``started()`` gives the path of an executable that hands its arguments, environment, folder
and open files to the server, which forks a process that runs them: a script, or ``-m MODULE``. The executable passes
signals on to that process, ends as it ends, and takes it along when it is killed. Any other call, such as ``-c``, it
gives to the real Python. Processes that the forked one starts by ``sys.executable`` are forked from the server too.
"""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import struct
import sys

_NUMBER = struct.Struct("!i")
_PASSED_ON = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}
_IMPORTED = [
    "dp_lightning.commands.fit_settings",
    "dp_lightning.commands.sweep",
    "dp_lightning.commands.training",
    "opacus.accountants",
    "sklearn.datasets",
    "torch.distributed.run",
    "torch.utils.tensorboard",
]


def _ask(place, arguments):
    """The executable: have the arguments run, and end as they end."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(place)
        asked = {
            "arguments": arguments,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "blocked": [int(number) for number in blocked],
        }
        message = json.dumps(asked).encode()
        socket.send_fds(server, [_NUMBER.pack(len(message))], [0, 1, 2])
        server.sendall(message)
        process = _NUMBER.unpack(_read(server, _NUMBER.size))[0]

        def pass_on(number, frame):
            with contextlib.suppress(ProcessLookupError):  # its end is on the way
                os.kill(process, number)

        for number in _PASSED_ON:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        code = os.waitstatus_to_exitcode(_NUMBER.unpack(_read(server, _NUMBER.size))[0])
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _read(connection, size):
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            sys.exit("the server has gone")
        content += part
    return content


def _tell(connection, number):
    with contextlib.suppress(OSError):  # the executable was killed
        connection.sendall(_NUMBER.pack(number))


def _serve(listener, owner):
    """The server: never returns in itself, and returns in each forked process what it is to run.

    Args:
        listener: socket on which the executables ask.
        owner: file descriptor that reads as ended when the tests have ended.
    """
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(owner, selectors.EVENT_READ)
    processes = {}  # by their connections
    while True:
        for key, _ in waiting.select():
            if key.fileobj is owner:
                for process in processes.values():
                    os.kill(process, signal.SIGKILL)
                os._exit(0)
            if key.fileobj is listener:
                connection, _ = listener.accept()
                files = []
                try:
                    size, files, *_ = socket.recv_fds(connection, _NUMBER.size, 3)
                    asked = json.loads(_read(connection, _NUMBER.unpack(size)[0]))
                except (OSError, struct.error, SystemExit):  # the executable was killed while it asked
                    for file in files:
                        os.close(file)
                    connection.close()
                    continue
                process = os.fork()
                if process == 0:
                    waiting.close()
                    for one in (listener, connection, *processes):
                        one.close()
                    os.close(owner)
                    return asked, files
                for file in files:
                    os.close(file)
                _tell(connection, process)
                processes[connection] = process
                waiting.register(connection, selectors.EVENT_READ)
                waiting.register(os.pidfd_open(process), selectors.EVENT_READ, connection)
            elif key.data is None:  # the executable was killed
                if key.fileobj in processes:  # and its process has not ended in the same moment
                    waiting.unregister(key.fileobj)
                    os.kill(processes[key.fileobj], signal.SIGKILL)
            else:
                waiting.unregister(key.fileobj)
                os.close(key.fileobj)
                connection = key.data
                _, status = os.waitpid(processes.pop(connection), 0)
                if connection.fileno() in waiting.get_map():
                    waiting.unregister(connection)
                    _tell(connection, status)
                connection.close()


def _become(asked, files):
    """Give a forked process what a new one would have."""
    import random

    import numpy as np
    import torch
    from lightning.fabric.utilities.rank_zero import _get_rank, rank_zero_only

    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    signal.pthread_sigmask(signal.SIG_SETMASK, asked["blocked"])
    # What these read when they are imported.
    random.seed()
    np.random.seed()
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rank_zero_only.rank = _get_rank() or 0


def _run(arguments):
    """Run the arguments as Python would; leaves out the second that Python takes at the end to free its imports."""
    import atexit
    import threading
    import traceback

    code = 0
    try:
        _call(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code % 256)


def _call(arguments):
    import runpy

    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def started(folder):
    """Start a server; yields the path of the executable, and ends the server and its processes at the end.

    Args:
        folder: for the executable and the socket; short, as the names of sockets must be.
    """
    import shlex
    import subprocess

    place, executable = folder / "socket", folder / "python"
    client = shlex.join([sys.executable, "-IS", __file__, "ask", str(place), sys.executable])
    executable.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    executable.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen(64)  # from now on an executable waits until the server has imported everything
        server = subprocess.Popen(
            [sys.executable, __file__, "serve", str(listener.fileno()), str(executable)],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
        )
    try:
        yield executable
    finally:
        server.stdin.close()
        server.wait()


def _main(role, place, path, *arguments):
    if role == "ask":
        runs = arguments and (arguments[0] == "-m" or not arguments[0].startswith("-"))
        if not runs:
            os.execv(path, [path, *arguments])
        _ask(place, list(arguments))
    from importlib import import_module

    sys.executable = path
    gc.disable()
    for name in _IMPORTED:
        import_module(name)
    gc.freeze()  # what was imported is not looked through, nor copied, by each of the processes
    gc.enable()
    owner = os.dup(0)
    asked, files = _serve(socket.socket(fileno=int(place)), owner)
    _become(asked, files)
    _run(asked["arguments"])


if __name__ == "__main__":
    _main(*sys.argv[1:])
