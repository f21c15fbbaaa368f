"""One experiment out of a list, brought to its end: python cleanrl_utils/engines/cells.py MATRIX.json INDEX [PID]

`python -m cleanrl_utils.benchmark` writes the list and starts this command once per cell, here, in a Slurm job, in a
Ray task or in a container; it can be started by hand as well, any number of times, anywhere that sees the same folder:
- a cell that is done (`done.json` in its folder) is left alone;
- a cell that runs elsewhere is waited for: the lock is a file lock that the training process inherits, so it is held
  for as long as anything of the run is alive and freed by the kernel, whoever was killed;
- a cell that was interrupted goes on in its run folder, from its last checkpoint (`--resume`);
- when this process dies, its training process is sent SIGTERM, writes a checkpoint and ends (Linux); so does this one
  when the process PID dies, which has to be the one that started it.
What a run prints goes to `log.txt` of the cell. Exit code: that of the run; 0 done, 75 interrupted, 2 wrong usage.

Only the standard library is imported, since every cell pays for it.
"""

import ctypes
import glob
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows; benchmark.py says so
    fcntl = None

INTERRUPTED = 75


def script_of(command):
    """Where in a command its script is named, and its path: x.py, or `-m a.b` for a/b.py; (None, None) without one."""
    for i, word in enumerate(command):
        if word.endswith(".py"):
            return i, word
        module = Path(*word.split(".")[:-1], word.split(".")[-1] + ".py")
        if i and command[i - 1] == "-m" and module.is_file():
            return i, str(module)
    return None, None


def text_of(script):
    """A key of the text of a script; empty if there is none."""
    return hashlib.sha256(Path(script).read_bytes()).hexdigest() if script and Path(script).is_file() else ""


def make_cell(command, env_id, seed):
    """A cell is known by its command and by the text of the script: other code is another experiment."""
    words = [*shlex.split(command), *(["--env-id", env_id] if env_id else []), "--seed", str(seed)]
    script = script_of(words)[1]
    text = text_of(script)
    key = hashlib.sha256(json.dumps([words, text]).encode()).hexdigest()[:10]
    name = "__".join(filter(None, [env_id, Path(script or words[0]).stem, str(seed), key]))
    return {"id": re.sub(r"[^\w.+-]", "-", name), "env_id": env_id, "seed": seed, "command": words, "script_sha": text}


def write_json(path, value):
    """Whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as file:
        file.write(json.dumps(value, indent=2))
        file.flush()
        os.fsync(file.fileno())  # or the name may outlive a power cut without the content
    os.replace(temporary, path)


def read_json(path):
    """The content of a file, or None if it is not there or not whole."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def is_done(folder):
    """The record of a finished cell; one whose run folder was deleted since is not finished."""
    done = read_json(folder / "done.json")
    return done if done and (done["run_dir"] is None or Path(done["run_dir"]).is_dir()) else None


def lock(folder, wait=True):
    """The open lock file of a cell, or None if another process holds it and `wait` is not set."""
    file = (folder / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        return file
    except BlockingIOError:
        file.close()
    except OSError as error:
        sys.exit(f"cells: the file system of {folder} has no locks ({error}): choose another folder with --state")


def same_words(command):
    """What a run writes down of its command, whatever has started it: the script and the words after it."""
    script, _ = script_of(command)
    return shlex.join(command[script or 0 :])


def expand(word):
    """A word such as runs/*__dqn_atari__1__*, for what another cell makes: the first that it matches, with a model."""
    found = glob.glob(word) if word.startswith("runs/") else []
    return min(found, key=lambda path: (not Path(path, "model.safetensors").exists(), path), default=word)


def find_run(cell, since):
    """The run folder that a cell's command has made since a time: the same words, and the same text of the script."""
    script, words, found = script_of(cell["command"])[1], same_words(cell["command"]), []
    for folder in Path("runs").glob(f"*__{cell['seed']}__*"):
        begun = folder.name.rsplit("__", 1)[1]
        command, copy = folder / "command.txt", folder / Path(script or "none").name
        if not begun.isdecimal() or int(begun) < int(since) or not command.exists():
            continue
        first = command.read_text().split("\n", 1)[0]
        if copy.exists() and text_of(copy) != cell["script_sha"]:
            continue
        if first == words or first.endswith(f" {words}"):
            found.append((any(folder.glob("checkpoint.*")), int(begun), folder))
    return str(max(found)[2]) if found else None  # one with a checkpoint, the newest of those


def die_with(parent):
    """In a child of `parent`: SIGTERM when it dies, whatever killed it (Linux)."""
    if sys.platform != "linux":
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C reaches the parent, too, which sends SIGTERM
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGTERM)


def run_process(command, log, held, begun):
    """Run a command with the lock in its hands; SIGTERM is passed on to it. The exit code, as a shell counts it."""
    process, stopped, parent = None, [], os.getpid()

    def stop(*received):
        stopped.append(received)
        if process:
            process.send_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "pass_fds": [held.fileno()]}
    options["preexec_fn"] = lambda: die_with(parent)
    try:
        process = subprocess.Popen(command, **options)
    except OSError as error:
        log.write(f"{error}\n".encode())
        return 127
    if stopped:  # before there was a process to tell
        process.send_signal(signal.SIGTERM)
    begun()
    code = process.wait()
    code = 128 - code if code < 0 else code
    return INTERRUPTED if stopped and code else code  # a launcher such as torchrun has an exit code of its own


def run_cell(cell, folder):
    """Run a cell unless it is done, and return the exit code of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    held = lock(folder)
    if is_done(folder):
        return 0
    begun = read_json(folder / "begun.json")
    begun = begun or {"since": time.time(), "attempts": 0, "seconds": 0.0, "run_dir": None}
    script = script_of(cell["command"])[1]
    if cell["script_sha"] and text_of(script) != cell["script_sha"]:
        why = f"{script} has changed since this list was made: start the benchmark again"
        (folder / "log.txt").open("a").write(f"$ {shlex.join(cell['command'])}\n{why}\n")
        write_json(folder / "failed.json", begun | {"ended": time.time(), "code": 2})
        print(f"cells: {why}", file=sys.stderr)
        return 2
    cell = cell | {"command": [expand(word) for word in cell["command"]]}
    if begun["attempts"] and not Path(begun["run_dir"] or "none").is_dir():
        begun["run_dir"] = find_run(cell, begun["since"])
    command = list(cell["command"])
    if begun["run_dir"] and any(Path(begun["run_dir"]).glob("checkpoint.*")):
        command += ["--resume", begun["run_dir"]]
    else:
        begun["run_dir"] = None
    begun["attempts"] += 1
    write_json(folder / "begun.json", begun)
    (folder / "failed.json").unlink(missing_ok=True)
    start, over = time.time(), threading.Event()

    def note_run_dir():
        """Write the run folder down as soon as it is there, while no other run can be taken for it."""
        while not begun["run_dir"] and not over.wait(1.0):
            begun["run_dir"] = find_run(cell, start)
            if begun["run_dir"]:
                write_json(folder / "begun.json", begun)

    with (folder / "log.txt").open("ab") as log:
        log.write(f"$ {shlex.join(command)}\n".encode())
        log.flush()
        noting = threading.Thread(target=note_run_dir)
        code = run_process(command, log, held, noting.start)
        log.write(f"exit code {code}\n".encode())
    over.set()
    if noting.ident:
        noting.join()
    begun["run_dir"] = begun["run_dir"] or find_run(cell, start)
    begun |= {"last_seconds": time.time() - start, "ended": time.time()}
    begun["seconds"] += begun["last_seconds"]
    write_json(folder / "begun.json", begun)
    record = begun | {"host": os.uname().nodename}
    if code == 0:
        write_json(folder / "done.json", record)
    elif code != INTERRUPTED:
        write_json(folder / "failed.json", record | {"code": code})
    return code


def main():
    if len(sys.argv) not in (3, 4) or not all(map(str.isdecimal, sys.argv[2:])):
        sys.stderr.write(__doc__)
        sys.exit(2)
    path = Path(sys.argv[1]).resolve()
    matrix = read_json(path)
    if matrix is None or int(sys.argv[2]) >= len(matrix["cells"]):
        print(f"cells: {path} has no cell {sys.argv[2]}", file=sys.stderr)
        sys.exit(2)
    if len(sys.argv) == 4:
        die_with(int(sys.argv[3]))
    os.chdir(matrix["cwd"])
    os.environ.update(matrix.get("variables", {}))
    cell = matrix["cells"][int(sys.argv[2])]
    sys.exit(run_cell(cell, path.parent / cell["id"]))


if __name__ == "__main__":
    main()
