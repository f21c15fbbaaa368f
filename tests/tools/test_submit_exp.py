"""submit_exp and its workers against moto's AWS Batch and S3, with real runs that are told to stop, killed and stolen.

Batch itself runs nothing here: what it was asked to run is started as a process, in a folder that is new each time, as
in a container.
"""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from cleanrl_utils import submit_exp
from cleanrl_utils.engines import cells, costs, s3_worker
from helpers.clusters import TINY, start_moto, wait_for
from helpers.files import ROOT, posix, require
from helpers.scalars import raw_scalars, steps

pytestmark = posix
BUCKET = "experiments"
SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY00"  # the form of a key, of nobody
PLACE = "--bucket", BUCKET, "--queue", "spot", "--definition", "cleanrl-cpu"


@pytest.fixture(scope="module")
def aws(request):
    """moto with a bucket, a queue and a definition: clients, the variables that lead there, and what jobs do."""
    url, patch, jobs = start_moto(request)
    import boto3

    variables = {"AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE", "AWS_SECRET_ACCESS_KEY": SECRET}
    variables |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": url, "AWS_EC2_METADATA_DISABLED": "true"}
    for name, value in variables.items():
        patch.setenv(name, value)

    s3, batch, iam = (boto3.client(name) for name in ("s3", "batch", "iam"))
    s3.create_bucket(Bucket=BUCKET)
    role = iam.create_role(RoleName="batch", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    environment = {"computeEnvironmentName": "here", "type": "UNMANAGED", "state": "ENABLED", "serviceRole": role}
    arn = batch.create_compute_environment(**environment)["computeEnvironmentArn"]
    order = [{"order": 1, "computeEnvironment": arn}]
    batch.create_job_queue(jobQueueName="spot", state="ENABLED", priority=1, computeEnvironmentOrder=order)
    sizes = [{"type": "VCPU", "value": "2"}, {"type": "MEMORY", "value": "4096"}]
    container = {"image": "cleanrl", "resourceRequirements": sizes}
    batch.register_job_definition(jobDefinitionName="cleanrl-cpu", type="container", containerProperties=container)
    ec2 = boto3.client("ec2")
    network = {"subnets": [ec2.describe_subnets()["Subnets"][0]["SubnetId"]]}
    network["securityGroupIds"] = [ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]]
    iam.create_instance_profile(InstanceProfileName="batch")
    iam.add_role_to_instance_profile(InstanceProfileName="batch", RoleName="batch")
    profile = iam.get_instance_profile(InstanceProfileName="batch")["InstanceProfile"]["Arn"]
    return SimpleNamespace(s3=s3, batch=batch, jobs=jobs, role=role, network=network, profile=profile)


class Containers:
    """Starts commands in new folders, each with the variables of a job, its output in log.txt."""

    def __init__(self, folder, prefix, s3):
        self.folder, self.prefix, self.s3, self.processes = folder, prefix, s3, []

    def start(self, command, index=0, job="", attempt=1, **variables):
        folder = self.folder / f"container-{len(self.processes)}"
        (folder / "cleanrl").mkdir(parents=True)
        (folder / "tiny.py").write_text(TINY)
        shutil.copy(ROOT / "cleanrl/ppo.py", folder / "cleanrl")
        env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        env |= {"AWS_BATCH_JOB_ARRAY_INDEX": str(index)}
        env |= {"AWS_BATCH_JOB_ID": f"{job}:{index}", "AWS_BATCH_JOB_ATTEMPT": str(attempt)} if job else {}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        with (folder / "output.txt").open("w") as log:
            pipes = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": folder, "env": env | variables}
            process = subprocess.Popen([str(word) for word in command], **pipes, start_new_session=True)
        process.folder, process.log = folder, (folder / "output.txt").read_text
        self.processes.append(process)
        return process

    def put(self, *matrix):
        """Write a list of cells to S3 and return the command that a container would be given."""
        self.matrix, url = matrix, f"s3://{BUCKET}/{self.prefix}/matrix-0.json"
        self.s3.put_object(Bucket=BUCKET, Key=f"{self.prefix}/matrix-0.json", Body=json.dumps({"cells": matrix}))
        return ["python", "-m", "cleanrl_utils.engines.s3_worker", url, "--sync-every", "0.5", "--lease", "30"]

    def state(self, index=0):
        key = s3_worker.state_key(self.prefix, self.matrix[index]["id"])
        return s3_worker.read_state(self.s3, BUCKET, key)[0] or {}

    def check_objects(self):
        """What is in S3 is what the states name, no more and no less."""
        named = {key for i in range(len(self.matrix)) for key in self.state(i).get("files", {}).values()}
        found = submit_exp.keys_under(self.s3, BUCKET, f"{self.prefix}/cells/")
        assert {key for key in found if not key.endswith("/state.json")} == named


@pytest.fixture
def containers(aws, tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    (place / "tiny.py").write_text(TINY)
    monkeypatch.chdir(place)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    found = Containers(tmp_path, re.sub(r"\W", "-", tmp_path.name), aws.s3)
    yield found
    for process in found.processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def call(*argv, code=0, **variables):
    """What submit_exp prints in this folder, with a change of variables; None removes one."""
    import boto3

    printed, found = io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
        patch.setattr(sys, "argv", ["submit_exp", *map(str, argv)])
        patch.setattr(boto3, "DEFAULT_SESSION", None)  # which knows the variables of before
        for name, value in variables.items():
            patch.delenv(name) if value is None else patch.setenv(name, value)
        try:
            submit_exp.main()
        except SystemExit as end:
            found = end.code or 0
    assert found == code, f"exit code {found}, not {code}:\n{printed.getvalue()}"
    return printed.getvalue()


def checkpoint_of(containers, process):
    """The key of the checkpoint in S3, once a worker is at it."""
    assert process.poll() is None, process.log()
    files = containers.state().get("files", {})
    return next((key for path, key in files.items() if path.endswith("checkpoint.pt")), None)


def test_a_run_outlives_its_machines(containers, tmp_path, monkeypatch):
    """SIGTERM, then kill -9 of everything: each time a new container goes on, and no metric is lost or doubled."""
    require("torch", "gymnasium", "tyro")
    total, size = 20480, 512
    monkeypatch.chdir(ROOT)
    command = f"python cleanrl/ppo.py --no-cuda --total-timesteps {total} --checkpoint-freq 1024"
    command = [*containers.put(cells.make_cell(command, "CartPole-v1", 1)), "--sync-every", "0.2"]
    monkeypatch.chdir(tmp_path)

    first = containers.start(command, job="job", attempt=1)
    key = wait_for(lambda: checkpoint_of(containers, first), "checkpoint")
    wait_for(lambda: checkpoint_of(containers, first) != key, "another checkpoint")
    first.terminate()
    assert first.wait(180) == 75, first.log()
    state = containers.state()
    assert state["state"] == "interrupted" and state["code"] == 75 and "Stopped at step" in state["log"]
    containers.check_objects()

    second = containers.start(command, job="job", attempt=2)
    key = wait_for(lambda: checkpoint_of(containers, second), "checkpoint")
    wait_for(lambda: checkpoint_of(containers, second) != key, "another checkpoint")
    os.killpg(second.pid, signal.SIGKILL)  # the machine is gone, and what it did since the last copy
    second.wait()
    assert containers.state()["state"] == "running"

    third = containers.start(command, job="job", attempt=3)
    assert third.wait(180) == 0, third.log()
    assert "--resume runs/CartPole-v1__ppo__1__" in third.log() and "done: s3://" in third.log()
    assert "sign of life" not in third.log()  # Batch begins the next attempt of a job when the one before has ended
    state = containers.state()
    assert (state["state"], state["starts"], state["code"]) == ("done", 3, 0)
    containers.check_objects()

    before = call("--fetch", f"s3://{BUCKET}/{containers.prefix}", "--out", "fetched")
    assert re.search(r"done +CartPole-v1__ppo__1__\w+: \d+ new files", before)
    (folder,) = Path("fetched").glob("CartPole*")
    for path in folder.rglob("*"):
        assert path.read_bytes() == (third.folder / "runs" / folder.name / path.name).read_bytes()
    found = steps(raw_scalars(folder))
    assert found["losses/value_loss"] == list(range(size, total + 1, size))
    assert all(len(set(values)) == len(values) for values in found.values())
    assert len(list(folder.glob("events*"))) == 3
    done = cells.read_json(next(Path("fetched/.benchmark").glob("*/done.json")))
    assert done["attempts"] == 3 and done["run_dir"] == f"runs/{folder.name}"
    assert "0 new files" in call("--fetch", f"s3://{BUCKET}/{containers.prefix}/matrix-0.json", "--out", "fetched")

    fourth = containers.start(command)
    assert fourth.wait(180) == 0 and "Done before" in fourth.log() and not list(fourth.folder.glob("runs/Cart*"))


def test_two_workers_on_a_cell(containers):
    """One that is alive keeps its cell. One that was frozen for longer than its lease loses it, and changes nothing."""
    command = containers.put(cells.make_cell("python tiny.py --steps 900", "long", 1))
    first = containers.start(command)
    wait_for(lambda: containers.state().get("state") == "running", "first worker")
    second = containers.start(command)
    assert second.wait(180) == 1 and "being run by" in second.log(), second.log()
    assert not list(second.folder.glob("*.journal")) and first.poll() is None

    os.killpg(first.pid, signal.SIGSTOP)
    key, state = f"{containers.prefix}/cells/{containers.matrix[0]['id']}/state.json", containers.state() | {"lease": 2}
    containers.s3.put_object(Bucket=BUCKET, Key=key, Body=json.dumps(state))  # half a minute is long to wait for
    third = containers.start(command)
    wait_for(lambda: list(third.folder.glob("long-1.journal")), "third worker")
    os.killpg(first.pid, signal.SIGCONT)
    assert first.wait(180) == 1 and "taken over by" in first.log(), first.log()
    third.terminate()
    assert third.wait(180) == 75, third.log()
    state = containers.state()
    assert (state["state"], state["starts"]) == ("interrupted", 2)
    containers.check_objects()


def test_a_start_without_its_files_changes_none(containers):
    """A worker that cannot get all files, or is told to stop before it has them, leaves those in S3 as they are."""
    command = containers.put(cells.make_cell("python tiny.py --steps 900", "long", 1))
    first = containers.start(command)
    wait_for(lambda: list(first.folder.glob("runs/long*/command.txt")) and containers.state(), "run")
    os.killpg(first.pid, signal.SIGINT)  # as Ctrl+C does
    assert first.wait(180) == 75 and "Traceback" not in first.log(), first.log()
    assert containers.state()["state"] == "interrupted"
    files = containers.state()["files"]
    (name,) = (path for path in files if path.endswith("checkpoint.txt"))
    body = containers.s3.get_object(Bucket=BUCKET, Key=files[name])["Body"].read()
    containers.s3.delete_object(Bucket=BUCKET, Key=files[name])
    second = containers.start(command)
    assert second.wait(180) == 75 and "404" in second.log(), second.log()
    assert containers.state()["files"] == files and not list(second.folder.glob("*.journal"))
    printed = call("--fetch", f"s3://{BUCKET}/{containers.prefix}", code=1)
    assert (
        f"long__tiny__1__{containers.matrix[0]['id'][-10:]} is not complete: s3://{BUCKET}/{files[name]}: " in printed
    )

    containers.s3.put_object(Bucket=BUCKET, Key=files[name], Body=body)
    slow = "import os, signal; from cleanrl_utils.engines import s3_worker; get = s3_worker.download\n"
    slow += "s3_worker.download = lambda *args: (get(*args), os.kill(os.getpid(), signal.SIGTERM))\ns3_worker.main()"
    third = containers.start(["python", "-c", slow, *command[3:]], job="job")
    assert third.wait(180) == 75, third.log()
    state = containers.state()
    assert state["files"] == files and state["state"] == "interrupted" and state["starts"] == 3


@contextmanager
def answering(answer):
    """A server on this machine: answer(method, path, body) -> (status, bytes)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            size = int(self.headers.get("Content-Length") or 0)
            status, body = answer(self.command, self.path, self.rfile.read(size))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_POST = do_GET

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_worker_that_was_late_removes_nothing(containers):
    """It was slow to get its files, and another has taken the cell since and sent files that it does not know of."""
    folder = f"{containers.prefix}/cells/x"
    claims = [s3_worker.Claim(containers.s3, BUCKET, folder, Path("none"), 0) for _ in range(2)]
    assert claims[0].take() and claims[1].take()
    for key in "new", "left-over":
        containers.s3.put_object(Bucket=BUCKET, Key=f"{folder}/{key}", Body=b"x")
    claims[1].put(files={"runs/x/new": f"{folder}/new"})
    with pytest.raises(s3_worker.Lost):
        claims[0].fetch()
    assert len(submit_exp.keys_under(containers.s3, BUCKET, folder)) == 3
    claims[1].fetch()
    assert submit_exp.keys_under(containers.s3, BUCKET, folder) == [f"{folder}/new", f"{folder}/state.json"]


def test_spot_notice(containers):
    """Two minutes before a Spot machine is taken, its metadata say so: the run stops in good time."""
    taken = []

    def metadata(method, path, body):
        if method == "PUT" and path == "/latest/api/token":
            return 200, b"token"
        return (200, b'{"action": "terminate"}') if taken else (404, b"")

    command = containers.put(cells.make_cell("python tiny.py --steps 900", "long", 1))
    with answering(metadata) as url:
        worker = containers.start(command, job="job", AWS_EC2_METADATA_SERVICE_ENDPOINT=url)
        wait_for(lambda: list(worker.folder.glob("long-1.journal")), "run")
        taken.append(True)
        assert worker.wait(180) == 75 and "about to be taken away" in worker.log(), worker.log()
    assert any(path.endswith("checkpoint.txt") for path in containers.state()["files"])


def test_the_notice_is_asked_for_again(monkeypatch):
    """Some answers of the metadata service get lost; one that never answers is left alone."""
    over, sent, answers = SimpleNamespace(wait=lambda seconds: False), [], [None, False, None, True]
    monkeypatch.setattr(os, "kill", lambda *args: sent.append(args))
    monkeypatch.setattr(s3_worker, "spot_notice", lambda: answers.pop(0))
    s3_worker.listen(over)
    assert sent == [(os.getpid(), signal.SIGTERM)] and not answers
    answers += [None] * 10
    s3_worker.listen(over)
    assert len(sent) == 1 and not answers


def test_failures_are_told_apart(containers):
    """A run that fails is not tried again; another text of the script is another experiment."""
    other = cells.make_cell("python tiny.py", "quick", 1) | {"script_sha": "0" * 64}
    command = containers.put(cells.make_cell("python tiny.py", "fail", 1), other)
    failing, changed = (containers.start(command, index) for index in range(2))
    assert failing.wait(180) == 1 and "seed 1 fails on purpose" in failing.log(), failing.log()
    assert containers.state(0)["state"] == "failed" and "fails on purpose" in containers.state(0)["log"]
    assert changed.wait(180) == 2 and "build and push it anew" in changed.log(), changed.log()
    absent = containers.start([*command[:3], f"s3://{BUCKET}/absent/matrix-0.json"])
    assert absent.wait(180) == 2 and "there is no s3://" in absent.log()


class Faulty:
    """S3 that does what it is asked, but of which answers are lost; with `away` set, those of questions as well."""

    def __init__(self, s3, error, away=True):
        self.s3, self.error, self.away, self.on = s3, error, away, False

    def __getattr__(self, name):
        return getattr(self.s3, name)

    def put_object(self, **request):
        answer = self.s3.put_object(**request)
        if self.on:
            raise self.error
        return answer

    def get_object(self, **request):
        if self.on and self.away:
            raise self.error
        return self.s3.get_object(**request)


class Cell:
    """A cell with a run in this folder, as the worker of a container has it."""

    def __init__(self, containers, lease=600):
        self.s3, self.lease, self.folder = containers.s3, lease, f"{containers.prefix}/cells/x"
        self.record, self.run_dir = Path("runs/.benchmark/x"), Path("runs/E__t__1__1")
        for folder in self.record, self.run_dir:
            folder.mkdir(parents=True, exist_ok=True)
        (self.record / "begun.json").write_text(json.dumps({"run_dir": str(self.run_dir)}))

    def claim(self, s3=None):
        found = s3_worker.Claim(s3 or self.s3, BUCKET, self.folder, self.record, self.lease)
        assert found.take()
        return found

    def checkpoint(self, text):
        (self.run_dir / "new.tmp").write_text(text)
        os.replace(self.run_dir / "new.tmp", self.run_dir / "checkpoint.pt")

    def state(self):
        """What is in S3, with the content of the files; all that it names has to be there, and nothing else."""
        state = s3_worker.read_state(self.s3, BUCKET, f"{self.folder}/state.json")[0]
        found = set(submit_exp.keys_under(self.s3, BUCKET, self.folder)) - {f"{self.folder}/state.json"}
        assert found == set(state["files"].values())
        bodies = {
            path: self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for path, key in state["files"].items()
        }
        return state["state"], bodies.get(f"{self.run_dir}/checkpoint.pt")


def test_a_lost_answer(containers):
    """S3 did what it was asked, but its answer was lost: nothing is taken for done that is not, no checkpoint lost."""
    from botocore.exceptions import ClientError, ReadTimeoutError

    refused = ClientError({"Error": {"Code": "PreconditionFailed"}}, "PutObject")  # boto's second try meets its first
    cell, s3 = Cell(containers), Faulty(containers.s3, refused, away=False)
    s3.on = True
    claim = cell.claim(s3)
    cell.checkpoint("1")
    claim.sync()
    assert cell.state() == ("running", b"1")

    s3.error, s3.away = ReadTimeoutError(endpoint_url="s3"), True
    cell.checkpoint("2")
    with pytest.raises(ReadTimeoutError):
        claim.sync()
    s3.on = False
    cell.checkpoint("3")
    claim.sync(state="done", code=0)
    assert cell.state() == ("done", b"3")


def test_a_lost_answer_before_another_takes_over(containers):
    """The new worker goes on from the state of which the old one does not know that it was written."""
    from botocore.exceptions import ReadTimeoutError

    cell, s3 = Cell(containers, lease=0), Faulty(containers.s3, ReadTimeoutError(endpoint_url="s3"))
    claim = cell.claim(s3)
    cell.checkpoint("1")
    claim.sync()
    cell.checkpoint("2")
    s3.on = True
    with pytest.raises(ReadTimeoutError):
        claim.sync()
    s3.on = False
    other = cell.claim()
    cell.checkpoint("3")
    with pytest.raises(s3_worker.Lost):
        claim.sync()
    files = s3_worker.read_state(cell.s3, BUCKET, f"{cell.folder}/state.json")[0]["files"]
    assert set(files.values()) <= set(submit_exp.keys_under(cell.s3, BUCKET, cell.folder))
    other.fetch()
    assert cell.state() == ("running", b"2")


def test_who_writes_at_the_same_time(containers):
    """A conflict that passes is waited for; a state that was removed and made anew belongs to somebody else."""
    from botocore.exceptions import ClientError

    cell, conflict = Cell(containers), ClientError({"Error": {"Code": "ConditionalRequestConflict"}}, "PutObject")
    conflicts, s3 = [conflict], Faulty(containers.s3, None)

    def put_object(**request):
        if conflicts:
            raise conflicts.pop()
        return cell.s3.put_object(**request)

    s3.put_object = put_object
    claim = cell.claim(s3)
    assert not conflicts
    cell.s3.delete_object(Bucket=BUCKET, Key=f"{cell.folder}/state.json")
    with pytest.raises(s3_worker.Lost, match="nobody, but removed"):
        claim.put()
    cell.claim()
    with pytest.raises(s3_worker.Lost, match="taken over by"):
        claim.put()


def test_a_start_in_a_used_folder(containers):
    """What an earlier start has left there is newer than S3, or older: the run goes on from what is in S3."""
    cell = Cell(containers, lease=0)
    cell.checkpoint("1")
    (cell.run_dir / "events").write_text("one")
    cell.claim().sync(state="interrupted")
    (cell.record / "done.json").write_text(json.dumps({"run_dir": str(cell.run_dir)}))
    (cell.run_dir / "events").write_text("one two")
    cell.claim().fetch()
    assert (cell.run_dir / "events").read_text() == "one" and not cells.is_done(cell.record)
    assert {path.name for path in Path("runs/.replaced").glob("*/*/*")} >= {"done.json", "events"}


def test_a_heart_beats_while_files_are_sent(containers, monkeypatch):
    """However long that takes: another worker sees within the lease that this one is alive."""
    cell, begun, go_on, ended = Cell(containers), threading.Event(), threading.Event(), threading.Event()
    s3, killed, sleep = Faulty(containers.s3, None), [], time.sleep
    s3.upload_file = lambda *args: (begun.set(), go_on.wait(), cell.s3.upload_file(*args))
    monkeypatch.setattr(os, "kill", lambda *args: killed.append(args))  # a worker that has lost its cell stops itself
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(min(seconds, 0.1)))
    claim = cell.claim(s3)
    often = SimpleNamespace(wait=lambda seconds: ended.wait(0.1))
    threads = [threading.Thread(target=s3_worker.beat, args=[claim, often]), threading.Thread(target=claim.sync)]
    try:
        for thread in threads:
            thread.start()
        assert begun.wait(180)
        with pytest.raises(s3_worker.Lost, match="being run by"):
            cell.claim()
        assert not go_on.is_set()
    finally:
        go_on.set()
        ended.set()
        for thread in threads:
            thread.join()
    assert claim.state["seconds"] > 0 and cell.state()[0] == "running" and not killed


@pytest.mark.parametrize("progress", [False, True])
def test_a_run_that_is_killed(containers, monkeypatch, capfd, progress):
    """It is tried again if it has come to a new checkpoint."""
    cell = Cell(containers)
    claim = cell.claim()

    def run_cell(*args):
        cell.__init__(containers)
        cell.checkpoint("1") if progress else None
        return 128 + signal.SIGSEGV

    monkeypatch.setattr(cells, "run_cell", run_cell)
    assert s3_worker.run(claim, None, 60) == (75 if progress else 1)
    assert "killed by signal 11" in capfd.readouterr().err


def test_missing_objects_may_be_denied(containers):
    """S3 says 403 instead of 404 to a role that may list its prefix only."""
    from botocore.exceptions import ClientError

    def denied(**request):
        raise ClientError({"Error": {"Code": "AccessDenied"}}, "GetObject")

    s3 = SimpleNamespace(get_object=denied, list_objects_v2=containers.s3.list_objects_v2)
    s3.exceptions = containers.s3.exceptions
    assert s3_worker.read_state(s3, BUCKET, f"{containers.prefix}/x") == (None, None, 0.0)
    containers.s3.put_object(Bucket=BUCKET, Key=f"{containers.prefix}/x", Body=b"{}")
    with pytest.raises(ClientError, match="AccessDenied"):
        s3_worker.read_state(s3, BUCKET, f"{containers.prefix}/x")


WRITER = """
import os, sys
from pathlib import Path

folder = Path(sys.argv[1])
for number in range(10**9):
    (folder / f"part-{number}").write_text("x")
    (folder / "unfinished.tmp").write_text(str(number))
    os.replace(folder / "unfinished.tmp", folder / "checkpoint.pt")
    (folder / f"part-{number - 1}").unlink(missing_ok=True)
"""


def test_snapshots_are_of_one_moment(tmp_path):
    """Whenever it is taken, a snapshot has the files that its checkpoint needs."""
    run_dir, record = tmp_path / "run", tmp_path / "record"
    run_dir.mkdir()
    record.mkdir()
    with subprocess.Popen([sys.executable, "-c", WRITER, run_dir]) as writer:
        try:
            wait_for(lambda: (run_dir / "checkpoint.pt").exists(), "checkpoint")
            seen, count = set(), 0
            while count < 300 or len(seen) <= 10:
                count += 1
                links, stamp = s3_worker.snapshot(record, run_dir, tmp_path / "links")
                names = {Path(path).name: link for path, (_, link) in links.items()}
                number = names["checkpoint.pt"].read_text()
                seen.add(number)
                assert f"part-{number}" in names and "unfinished.tmp" not in names and "checkpoint.pt" in stamp
        finally:
            writer.kill()


def test_submission(aws, containers):
    """A suite, from the plan to the fetched runs; no secret of this machine is in anything that leaves it."""
    from moto.batch.models import batch_backends

    prefix, url = containers.prefix, f"s3://{BUCKET}/{containers.prefix}"
    flags = "--command", "python tiny.py", "--env-ids", "quick", "fail", "--num-seeds", 2, *PLACE, "--prefix", prefix
    secrets = {"WANDB_API_KEY": "f" * 40, "HF_TOKEN": "hf_" + "a" * 34}
    planned = json.loads(re.search(r"(?ms)^\{$.*", call(*flags, "--dry-run", AWS_ENDPOINT_URL="http://127.0.0.1:9"))[0])
    aws.jobs("stay")
    assert "say --yes" in call(*flags, code=2)
    assert not submit_exp.keys_under(aws.s3, BUCKET, prefix)
    printed = call(*flags, "--yes", "--price-per-vcpu-hour", 0.5, "--hours-per-cell", 2, **secrets)
    assert "estimate: 8.0 h x $1 = $8.00" in printed and "4 cells x 10 attempts x 24 h x $1 = $960.00" in printed
    (job,) = re.findall(r"Submitted job (\S+) with 4 cells", printed)
    (described,) = aws.batch.describe_jobs(jobs=[job])["jobs"]
    assert described["container"]["command"] == planned["containerOverrides"]["command"]
    assert planned["arrayProperties"] == {"size": 4} and planned["jobName"][:-9] == described["jobName"][:-9]
    assert {"name": "OMP_NUM_THREADS", "value": "2"} in described["container"]["environment"]  # the definition's vCPUs
    actions = planned["retryStrategy"]["evaluateOnExit"]
    assert (
        planned["retryStrategy"]["attempts"] == 10
        and len(actions) <= 5
        and actions[0] == {"onExitCode": "75", "action": "RETRY"}
    )
    assert planned["timeout"] == {"attemptDurationSeconds": 86400}

    assert "Nothing to submit: 4 waiting" in call(*flags, "--yes")
    assert "4 cells: 4 waiting" in call("--status", url, code=75)
    workers = [containers.start(described["container"]["command"], index, job, **secrets) for index in range(4)]
    for worker, code in zip(workers, (0, 0, 1, 1)):
        assert worker.wait(180) == code, worker.log()

    def ended(task):
        return aws.batch.describe_jobs(jobs=[task])["jobs"][0]["status"] == "FAILED"

    aws.jobs("fail")
    wait_for(lambda: ended(f"{job}:3"), "end of the job")
    status = call("--status", url, code=1)
    assert "4 cells: 2 done, 2 failed" in status and "    seed 2 fails on purpose" in status
    fetched = call("--fetch", url)
    assert fetched.count("new files") == 4 and len(list(Path("runs").glob("quick__tiny__*/command.txt"))) == 2
    assert cells.is_done(next(Path("runs/.benchmark").glob("quick__tiny__1__*")))

    aws.jobs("stay")
    printed += call(*flags, "--definition", "cleanrl-cpu:1", "--yes")
    assert "2 cells for spot (cleanrl-cpu:1); not again: 2 done" in printed
    assert "say --yes" in call("--cancel", url, code=2)
    (job,) = re.findall(r"Submitted job (\S+) with 2 cells", printed)
    assert not ended(job) and job in call("--cancel", url, "--yes")
    assert batch_backends["123456789012"]["us-east-1"].get_job_by_id(job).stop  # all that moto does about it
    record = f"{prefix}/jobs/{aws.batch.describe_jobs(jobs=[job])['jobs'][0]['jobName']}.json"
    content, _, _ = s3_worker.read_state(aws.s3, BUCKET, record)
    aws.s3.put_object(Bucket=BUCKET, Key=record, Body=json.dumps(content | {"job": None}))  # killed before it knew
    assert "Nothing to submit: 2 done, 2 waiting" in call(*flags, "--yes")
    everything = printed + status + fetched + json.dumps(described, default=str) + json.dumps(planned)
    for key in submit_exp.keys_under(aws.s3, BUCKET, prefix):
        everything += aws.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read().decode(errors="replace")
    for value in (SECRET, "AKIAIOSFODNN7EXAMPLE", *secrets.values()):
        assert value not in everything


def test_what_is_refused(aws, containers):
    flags = "--command", "python tiny.py", "--env-ids", "quick", *PLACE, "--prefix", containers.prefix, "--yes"
    for variable in (
        f"NOTE={SECRET}",
        "MY_API_KEY=12345678",
        "A_TOKEN=87654321",
        "X=hf_" + "a" * 30,
        "X=AKIAIOSFODNN7EXAMPLE",
        "X=postgres://me:hunter2@db/x",
    ):
        printed = call(*flags, "--env", variable, code=2)
        assert "looks like a secret" in printed and variable.split("=", 1)[1] not in printed
    for words in ("--env", "X=correct-horse"), ("--command", "python tiny.py --x correct-horse"):
        assert "a secret" in call(*flags, *words, code=2, WANDB_API_KEY="correct-horse")
    assert "seems to hold a secret" in call(*flags, "--command", "python tiny.py --api-key 123", code=2)
    assert "seems to hold a secret" in call(*flags, "--command", f"python tiny.py --x={SECRET}", code=2)
    assert "NAME=VALUE" in call(*flags, "--env", "WORD", code=2)
    assert "no job queue absent in us-east-1" in call(*flags, "--queue", "absent", code=2)
    assert "no active job definition absent" in call(*flags, "--definition", "absent", code=2)
    assert "there is no bucket absent" in call(*flags, "--bucket", "absent", code=2)
    assert "no region" in call(*flags, code=2, AWS_DEFAULT_REGION=None, HOME="/none")
    keys = dict.fromkeys(["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    assert "redentials" in call(*flags, code=2, **keys, HOME="/none")
    assert "--bucket takes" in call(*flags, "--bucket", "s3://x/y", code=2)
    assert "--retries must be" in call(*flags, "--retries", 10, code=2)
    assert "not allowed with" in call("--status", "s3://a/b", "--cancel", "s3://a/b", code=2)
    tracked = "--suite", "two.toml", "--command", "python tiny.py --track", "--env-ids", "quick", *PLACE
    Path("two.toml").write_text('[[run]]\ncommands = ["python tiny.py --track --lr 2"]\nenv_ids = ["quick"]\n')
    assert "tell these apart with --exp-name" in call(*tracked, "--dry-run", code=2)
    printed = call(*tracked[:3], "python tiny.py", *tracked[4:], "--dry-run")
    assert "unknown here: give --vcpus" in printed and "not in S3" in printed
    assert "nothing was submitted" in call("--status", f"s3://{BUCKET}/none", code=2)
    assert "not of the form s3://" in call("--fetch", BUCKET, code=2)
    assert "what to run?" in call(*PLACE, code=2)
    assert not submit_exp.keys_under(aws.s3, BUCKET, containers.prefix)
    Path("boto3.py").write_text("raise ImportError")
    shutil.copytree(ROOT / "cleanrl_utils", "cleanrl_utils")
    command = [sys.executable, "-m", "cleanrl_utils.submit_exp", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and 'pip install -e ".[cloud]"' in done.stderr and "Traceback" not in done.stderr
    for path in "runs/../../x", "/etc/passwd", "runs/x":
        with pytest.raises(ValueError, match="not in a folder of runs/"):
            s3_worker.download(aws.s3, BUCKET, {path: "key"}, Path)
    containers.put({"id": "../../../evil"})
    for url in f"s3://{BUCKET}/{containers.prefix}", f"s3://{BUCKET}/{containers.prefix}/matrix-0.json":
        assert "names the cell '../../../evil'" in call("--fetch", url, code=2)


def test_two_jobs_have_a_cell(containers, monkeypatch):
    """A cell that one job runs is running, whatever became of another; one list is cancelled without the other."""
    matrix, url = [{"id": f"c{i}"} for i in range(3)], f"s3://{BUCKET}/{containers.prefix}"
    for name, part in ("A", matrix), ("B", matrix[2:]):
        record = {"job": name, "name": name, "queue": "spot", "url": f"{url}/matrix-{name}.json"}
        for key, body in (f"matrix-{name}", {"cells": part}), (f"jobs/{name}", record | {"cells": ["c0", "c1", "c2"]}):
            containers.s3.put_object(Bucket=BUCKET, Key=f"{containers.prefix}/{key}.json", Body=json.dumps(body))
    for cell, owner in ("c0", ""), ("c2", "A:2"):  # the first by hand
        monkeypatch.setenv("AWS_BATCH_JOB_ID", owner)
        s3_worker.Claim(containers.s3, BUCKET, f"{containers.prefix}/cells/{cell}", Path("none"), 600).take()
    jobs, ended = {"A": ("RUNNING", ""), "B": ("FAILED", "exited")}, []
    monkeypatch.setattr(submit_exp.aws_batch, "states_of", lambda _, tasks: {task: jobs[task[0]] for task in tasks})
    batch = SimpleNamespace(terminate_job=lambda jobId, reason: ended.append(jobId))
    found = submit_exp.survey(containers.s3, batch, BUCKET, containers.prefix, matrix)
    assert [standing for standing, _, _ in found] == ["running", "waiting", "running"]
    jobs["A"] = "FAILED", "gone"
    found = submit_exp.survey(containers.s3, batch, BUCKET, containers.prefix, matrix)
    assert [standing for standing, _, _ in found] == ["running", "failed", "failed"]
    jobs |= {"A": ("RUNNABLE", "CAPACITY"), "B": ("RUNNING", "")}
    submit_exp.cancel(containers.s3, batch, f"{url}/matrix-B.json", True)
    assert ended == ["B"]
    submit_exp.cancel(containers.s3, batch, url, True)
    assert sorted(ended) == ["A", "B", "B"]


def test_runs_of_the_same_name_are_kept_apart(containers):
    """Containers know nothing of each other: two runs may begin in the same second, and one of this machine, too."""
    names = ["E__t__1__aaaa", "E__t__1__bbbb"]
    containers.put(*({"id": name} for name in names))
    for name in names:
        files, folder = {}, f"{containers.prefix}/cells/{name}"
        record = json.dumps({"run_dir": "runs/E__t__1__17"})
        for path, body in (
            (f".benchmark/{name}/done.json", record),
            ("E__t__1__17/a", name),
            (f"E__t__1__17/{name}", "x"),
        ):
            files[f"runs/{path}"] = f"{folder}/0/{path}"
            containers.s3.put_object(Bucket=BUCKET, Key=f"{folder}/0/{path}", Body=body)
        state = json.dumps({"state": "done", "files": files})
        containers.s3.put_object(Bucket=BUCKET, Key=f"{folder}/state.json", Body=state)
    for new in 3, 0:
        printed = call("--fetch", f"s3://{BUCKET}/{containers.prefix}")
        assert printed.count(f": {new} new files") == 2
    for name, run in zip(names, ["runs/E__t__1__17", "runs/E__t__1__17-bbbb"]):
        assert cells.is_done(Path("runs/.benchmark", name))["run_dir"] == run
        assert Path(run, "a").read_text() == name and len(list(Path(run).iterdir())) == 2

    path = f".benchmark/{names[1]}/done.json"
    state = {"state": "running", "files": {f"runs/{path}": f"{folder}/0/{path}"}}
    containers.s3.put_object(Bucket=BUCKET, Key=f"{folder}/state.json", Body=json.dumps(state))
    call("--fetch", f"s3://{BUCKET}/{containers.prefix}")
    assert not Path("runs/E__t__1__17-bbbb").exists() and Path("runs/E__t__1__17").exists()


def test_hours_come_from_measured_speeds(tmp_path, monkeypatch):
    """Those of cells in S3 before those of this machine, of the same environment before others; gaps are named."""
    require("tensorboard")
    monkeypatch.chdir(ROOT)
    quick, slow, other = (
        cells.make_cell(command, "CartPole-v1", 1)
        for command in (
            "python cleanrl/ppo.py --total-timesteps 36_000",
            "python cleanrl/ppo.py",
            "python cleanrl/dqn.py",
        )
    )
    assert [costs.steps_of(cell) for cell in (quick, slow)] == [36000, 500_000]
    states = [{"state": "done", "seconds": 3600.0}, {"state": "done", "seconds": 150_000.0}, None]
    speed = costs.measured_speeds([quick, slow, other], states)[costs.kind(quick)]
    assert speed == pytest.approx(2 / (3600 / 36000 + 150_000 / 500_000))  # 5 steps a second
    hours, line = costs.hours_of([quick, slow], {}, {("ppo.py", "Acrobot-v1"): 10.0})
    assert hours == [1.0, 500 / 36] and "14.9 h in all (steps / speed of runs of this machine" in line
    known = {("ppo.py", "CartPole-v1"): 20.0, ("ppo.py", "Acrobot-v1"): 5.0}
    hours, line = costs.hours_of([quick, other], known, {("ppo.py", "CartPole-v1"): 1.0})
    assert hours == [0.5, None] and "no measured speed for 1 cell of dqn.py" in line
    lines = list(costs.lines_of(hours, line, 0.1, "price", 4, 24))
    assert lines[2] == "  estimate: 0.5 h x $0.1 + 1 cell x unknown hours x $0.1, so more than $0.05"
    lines = list(costs.lines_of([0.5], line, None, "unknown", 4, 24))
    assert lines[2] == "  estimate: 0.5 h x unknown" and "1 cell x 4 attempts x 24 h x unknown, if" in lines[3]

    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "CartPole-v1__ppo__1__1"
    with SummaryWriter(folder) as writer:
        writer.add_scalar("charts/SPS", 100, 1)
        writer.add_scalar("charts/SPS", 300, 2)
    (folder / "ppo.py").touch()
    (folder / "args.json").write_text('{"env_id": "CartPole-v1"}')
    assert costs.local_speeds({costs.kind(quick)}, tmp_path) == {("ppo.py", "CartPole-v1"): 300.0}
    assert costs.local_speeds({costs.kind(other)}, tmp_path) == {}


def test_prices_are_looked_up_and_never_made_up(aws, monkeypatch):
    def queue(name, kind, *types):
        resources = {"type": kind, "minvCpus": 0, "maxvCpus": 4, "instanceTypes": list(types)}
        resources |= aws.network | {"instanceRole": aws.profile}
        environment = {"computeEnvironmentName": name, "type": "MANAGED", "state": "ENABLED", "serviceRole": aws.role}
        arn = aws.batch.create_compute_environment(**environment, computeResources=resources)["computeEnvironmentArn"]
        order = [{"order": 1, "computeEnvironment": arn}]
        aws.batch.create_job_queue(jobQueueName=name, state="ENABLED", priority=1, computeEnvironmentOrder=order)

    queue("two", "SPOT", "c5", "c5.xlarge")
    price, line = costs.asked_price(aws.batch, "two", None, 2, 1024, 0, "us-east-1")
    assert price == 1e-5 and "1 of a c5.large at $1e-05 (highest Spot price" in line  # moto's price of anything
    assert costs.asked_price(aws.batch, "two", "c5.xlarge", 2, 2048, 0, "us-east-1")[0] == 5e-6
    for memory, price in (1900, 5e-6), (3500, 1e-5):  # 3500 of 4096 MiB leave no room for a second cell
        assert costs.asked_price(aws.batch, "two", "c5.large", 1, memory, 0, "us-east-1")[0] == price
    price, line = costs.asked_price(aws.batch, "spot", None, 2, 1024, 0, "us-east-1")
    assert price is None and "give --instance-type or a price" in line

    def price_list(method, path, body):
        assert {"Type": "TERM_MATCH", "Field": "instanceType", "Value": "g5.12xlarge"} in json.loads(body)["Filters"]
        dimension = {"pricePerUnit": {"USD": "8.0000"}}
        product = {"terms": {"OnDemand": {"x": {"priceDimensions": {"y": dimension}}}}}
        return 200, json.dumps({"PriceList": [json.dumps(product)]}).encode()

    queue("gpu", "EC2", "g5.12xlarge")
    with answering(price_list) as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL_PRICING", url)
        price, line = costs.asked_price(aws.batch, "gpu", None, 8, 1024, 1, "us-east-1")
    assert price == 2.0 and "0.25 of a g5.12xlarge at $8 (on-demand price list" in line
