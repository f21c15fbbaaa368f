"""What the tests of engines and of the cloud share: a tiny script to run, a server that stands for AWS."""

import json
import time
import urllib.request

import pytest

from helpers.files import require

TINY = """
import argparse, fcntl, os, shlex, signal, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--env-id")
parser.add_argument("--seed")
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--resume", type=Path)
args = parser.parse_args()
begun = Path("runs", f"{args.env_id}__tiny__{args.seed}__{int(time.time())}")
folder = args.resume or begun
journal = Path(f"{args.env_id}-{args.seed}.journal").open("a", buffering=1)
marker = Path(f"{args.env_id}-{args.seed}.marker").open("a")
stopped = []
signal.signal(signal.SIGTERM, lambda *received: stopped.append(received))
try:
    fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    journal.write("twice\\n")
if not args.resume:
    folder.mkdir(parents=True)
    (folder / "command.txt").write_text(shlex.join(sys.argv))
checkpoint = folder / "checkpoint.txt"
step = int(checkpoint.read_text()) if args.resume else 0
journal.write(f"start {os.getpid()}\\n")
while step < args.steps:
    time.sleep(0.1 if args.env_id == "long" else 0)
    while step == args.steps // 2 and Path("hold").exists() and not stopped:
        time.sleep(0.1)
    step += 1
    journal.write(f"step {step}\\n")
    if stopped or (args.env_id == "again" and step == 1 and not args.resume) or args.env_id == "never":
        time.sleep(0.5)  # as long as a checkpoint takes
        checkpoint.write_text(str(step))
        journal.write("checkpoint\\n")
        sys.exit(75)
if args.env_id == "fail":
    sys.exit(f"seed {args.seed} fails on purpose")
journal.write("end\\n")
"""


def wait_for(condition, what, seconds=240):
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"no {what} after {seconds} s"
        time.sleep(0.1)
    return value


def start_moto(request):
    """An empty AWS by moto until the fixture ends: its address, the patch, and a function that says how jobs fare."""
    require("boto3", "moto", "flask", "docker")
    from moto.server import ThreadedMotoServer

    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setenv("DOCKER_HOST", "tcp://127.0.0.1:9")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    request.addfinalizer(server.stop)
    url = "http://{}:{}".format(*server.get_host_and_port())

    def post(path, body):
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{url}/moto-api/{path}", json.dumps(body).encode(), headers)
        urllib.request.urlopen(asked, timeout=30).close()

    def jobs(fate):
        """What becomes of jobs: they "succeed" at once and do nothing, or "stay" in the queue, or "fail"."""
        post("config", {"batch": {"use_docker": fate != "succeed"}})  # of which there is none
        how = {"progression": "manual", "times": 10**6} if fate == "stay" else {"progression": "immediate"}
        post("state-manager/set-transition", {"model_name": "batch::job", "transition": how})

    post("reset", {})  # servers of one process share what is in them
    return url, patch, jobs
