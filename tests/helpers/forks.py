"""Runs of scripts that start in no time: a server imports the heavy packages once and forks itself for each run.

The servers belong to the process that collects the tests, and all its workers use them.

A fork sees what a new process of the same command line would see: folder, arguments, standard streams, exit code,
signals. What it shares with other forks is the state of the packages after their import, and the seed of Python's
hashes; so the tests of reproducibility, of a file alone and of what is missing start real processes.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from ctypes.util import find_library

PRELOAD = {  # not MuJoCo, which reads MUJOCO_GL at its import
    "torch": "torch torch._dynamo torch.utils.tensorboard gymnasium tyro safetensors.torch".split(),
    "jax": "jax flax.linen optax gymnasium tyro safetensors.flax tensorboard.summary.writer.event_file_writer".split(),
}


def load_qt():
    """Procgen needs Qt before anything imports EnvPool: as in ppo_procgen.py."""
    with contextlib.suppress(ImportError, OSError):
        import PyQt5

        for library in ("Core", "Gui") if find_library("Qt5Gui") is None else ():
            ctypes.CDLL(f"{PyQt5.__path__[0]}/Qt5/lib/libQt5{library}.so.5")


spent = 0.0  # seconds of processor time of the forks that this process has waited for


class Fork:
    """The part of subprocess.Popen that the tests use."""

    def __init__(self, server, argv, cwd, code=None, env=None, alone=False):
        self.args, self.returncode = argv, None
        self.files = [tempfile.TemporaryFile("w+") for _ in range(2)]
        self.status, status = os.pipe()
        request = json.dumps({"argv": argv, "cwd": str(cwd), "code": code, "env": env, "alone": alone}).encode()
        socket.send_fds(server, [request], [*(file.fileno() for file in self.files), status])
        os.close(status)
        self.pid = self.read()

    def read(self):
        number = os.read(self.status, 4)
        assert number, "the server of forks has ended"
        return int.from_bytes(number, "little", signed=True)

    def wait(self, timeout=None):
        global spent
        if self.returncode is None:
            if not select.select([self.status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = self.read()
            spent += self.read() / 1000
            os.close(self.status)
        return self.returncode

    def poll(self):
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        self.wait(timeout)
        for file in self.files:
            file.seek(0)
        return tuple(file.read() for file in self.files)


def begin(folder, environments):
    """Start servers that listen in this folder, for files `alone` and others; they end with this process.

    They import nothing before the first run that needs them. Files that run alone load EnvPool, and what it needs,
    themselves.
    """
    end, _ = os.pipe()  # of which this process keeps the other end as long as it lives
    for kind in PRELOAD:
        for alone, env in environments.items():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(address(folder, kind, alone))
                listener.listen(64)
                fds = listener.fileno(), end
                command = [sys.executable, __file__, *map(str, fds), *PRELOAD[kind], *["envpool"] * (not alone)]
                subprocess.Popen(command, env=env, pass_fds=fds, stdin=subprocess.DEVNULL)
    os.close(end)


def address(folder, kind, alone):
    return os.path.join(folder, f"{kind}-alone" if alone else kind)


def connect(folder, kind, alone=False):
    """A connection to one of the servers of this folder."""
    ours = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.connect(address(folder, kind, alone))
    return ours


def serve(listener, end, preload):
    """Fork for each request; returns in each fork, with the request, and at the end of the server, with None."""
    children, controls = {}, []  # pid -> where its exit code goes
    while True:
        ready = select.select([listener, end, *controls], [], [], 0.005 if children else None)[0]
        if end in ready:
            return None
        if listener in ready:
            if preload:
                preload.pop()()
            controls.append(listener.accept()[0])
        for control in set(ready) & set(controls):
            message, fds, _, _ = socket.recv_fds(control, 1 << 20, 3)
            if not message:
                controls.remove(control)
                control.close()
                continue
            pid = os.fork()
            if pid == 0:
                for one in [listener, *controls]:
                    one.close()
                for fd in [end, fds[2], *children.values()]:
                    os.close(fd)
                for fd in (1, 2):
                    os.dup2(fds[fd - 1], fd)
                    os.close(fds[fd - 1])
                return json.loads(message)
            children[pid] = fds[2]
            send(fds[2], pid)
            os.close(fds[0])
            os.close(fds[1])
        for pid in list(children):
            done, status, usage = os.wait4(pid, os.WNOHANG)
            if done:
                fd = children.pop(pid)
                send(fd, os.waitstatus_to_exitcode(status), round(1000 * (usage.ru_utime + usage.ru_stime)))
                os.close(fd)


def send(fd, *numbers):
    with contextlib.suppress(BrokenPipeError):  # who has asked is gone
        os.write(fd, b"".join(number.to_bytes(4, "little", signed=True) for number in numbers))


def enter_network():
    """From now on, this process is in a network of its own, with nothing but the loopback."""
    import fcntl
    import struct

    if ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
        raise OSError("no network of its own")
    with socket.socket() as any_socket:  # SIOCSIFFLAGS: lo is up and running
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14s", b"lo", 0x41, b""))


def prepare(request):
    """Make this fork look as if it had been started for its request; returns the code that it is to run."""
    os.chdir(request["cwd"])
    if request["alone"]:
        enter_network()
    sys.argv = request["argv"]
    sys.orig_argv = [sys.executable, *sys.argv]
    sys.path[0] = os.path.dirname(sys.argv[0])
    if request["env"] is not None:
        before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ.clear()
        os.environ.update(request["env"])
        after = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.path[1:] = [*after, *(path for path in sys.path[1:] if path not in before)]
    if request["code"] is not None:
        return compile(request["code"], "<string>", "exec")
    with open(sys.argv[0]) as file:
        return compile(file.read(), sys.argv[0], "exec")


def finish(code, main):
    """Run the code, alone in the namespace `main`, and end as Python does.

    Except for taking the heavy packages apart again: that takes it longer than many a run.
    """
    import atexit
    import os
    import sys
    import threading
    import traceback

    status = 0
    for name in set(main) - {"__name__", "__builtins__"}:
        del main[name]
    main["__file__"] = code.co_filename
    try:
        exec(code, main)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if status == 1 and end.code != 1:
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def preload():
    if "envpool" in sys.argv:
        load_qt()
    for name in sys.argv[3:]:
        with contextlib.suppress(ImportError):  # a test that needs it says so
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # forks do not collect, and so do not copy, what was loaded before them


if __name__ == "__main__":
    request = serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), [preload])
    if request:
        finish(prepare(request), globals())
