"""The benchmark's engines with a real Slurm, a real Ray cluster and moto's AWS Batch, and what happens when parts die.

The cells run a small script with the manners of the algorithm files: it makes a run folder, writes a checkpoint and
exits with 75 at SIGTERM, and goes on with --resume. Its journal has every step and shows if it ever ran twice at once.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.clusters import TINY, start_moto, wait_for
from helpers.files import ROOT, posix, require, require_program
from helpers.processes import private_network

pytestmark = [posix, pytest.mark.skipif(not Path("/proc/self/ns").exists(), reason="looks for processes in /proc")]

KEEPER = "sleep 1001"  # keeps a private network


def processes(network):
    """The processes in a private network, besides the one that keeps it: pid -> command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and os.readlink(folder / "ns/net") == network:
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
        except OSError:  # it has just ended
            pass
    return {pid: command for pid, command in found.items() if command and command != KEEPER}  # a zombie has none


def catches(pid, number):
    """Whether a process has a handler of its own for a signal."""
    caught = re.search(r"(?m)^SigCgt:\s+(\w+)", Path(f"/proc/{pid}/status").read_text())[1]
    return int(caught, 16) >> (number - 1) & 1


def parent(pid):
    return int(re.search(r"(?m)^PPid:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


class Place:
    """A folder with the script, and how commands are run there: with these words before them."""

    def __init__(self, folder, before=(), **variables):
        self.folder, self.before = folder, before
        (folder / "tiny.py").write_text(TINY)
        self.env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "disabled", "COLUMNS": "500"} | variables
        self.env["PATH"] = f"{Path(sys.executable).parent}:{self.env['PATH']}"

    def start(self, *argv, command="python tiny.py", seeds=1, **options):
        """The benchmark, of all environments that are named; it writes to benchmark.log."""
        words = ["-m", "cleanrl_utils.benchmark", "--command", command, "--num-seeds", str(seeds), *map(str, argv)]
        with (self.folder / "benchmark.log").open("w") as log:
            pipes = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": self.folder, "env": self.env | options}
            return subprocess.Popen([*self.before, sys.executable, *words], **pipes, start_new_session=True)

    def log(self):
        return (self.folder / "benchmark.log").read_text()

    def run(self, *argv, code=0, timeout=400, **options):
        process = self.start(*argv, **options)
        try:
            found = process.wait(timeout)
        finally:
            process.kill()
        assert found == code, f"exit code {found}, not {code}:\n{self.log()[-4000:]}"
        return self.log()

    def journal(self, name):
        path = self.folder / f"{name}.journal"
        return path.read_text().splitlines() if path.exists() else []

    def pids(self, name):
        return [int(line.split()[1]) for line in self.journal(name) if line.startswith("start")]

    def reach(self, name, step, process=None):
        def reached():
            assert process is None or process.poll() is None, self.log()[-4000:]
            return f"step {step}" in self.journal(name)

        wait_for(reached, f"step {step} of {name}")

    def check(self, name, steps, starts):
        """Every step was taken once, in as many starts as are expected, and never by two at once."""
        lines = self.journal(name)
        assert "twice" not in lines and lines[-1] == "end"
        assert [line for line in lines if line.startswith("step")] == [f"step {i + 1}" for i in range(steps)]
        assert len(self.pids(name)) == starts


@contextmanager
def network():
    """A private network: its name, and the words that run a command in it. What is left in it is killed at the end."""
    if not private_network() or "--map-root-user" in private_network():
        why = "Slurm and Ray listen on all addresses, and only root can give them a network of their own: be root, or "
        why += 'leave these tests out: make test ARGS="--ignore tests/tools/test_engines.py"'
        pytest.fail(why) if os.environ.get("CLEANRL_REQUIRE_ALL") == "1" else pytest.skip(why)
    keeper = subprocess.Popen([*private_network(), "sh", "-c", f"echo up && exec {KEEPER}"], stdout=subprocess.PIPE)
    name = ""
    try:
        assert keeper.stdout.readline() == b"up\n"
        name = os.readlink(f"/proc/{keeper.pid}/ns/net")
        assert name != os.readlink("/proc/self/ns/net")
        yield name, ["nsenter", f"--net=/proc/{keeper.pid}/ns/net"]
    finally:
        for pid in processes(name):
            os.kill(pid, signal.SIGKILL)
        keeper.kill()
        keeper.wait()
        keeper.stdout.close()


# Slurm

SLURM = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
# a task that goes back into the queue waits for as long as a credential lives, two minutes if nothing is said
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SchedulerParameters=sched_interval=1,batch_sched_delay=0
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
MaxArraySize=4
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs=4
PartitionName=main Nodes={host} Default=YES State=UP
"""


class Slurm:
    def __init__(self, folder, before):
        self.folder, self.before = folder, before
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        host = os.uname().nodename.split(".")[0]
        (folder / "slurm.conf").write_text(SLURM.format(folder=folder, host=host))
        (folder / "munge.key").write_bytes(os.urandom(64))
        (folder / "munge.key").chmod(0o600)

    def call(self, *command):
        done = subprocess.run([*self.before, *command], env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self):
        self.call("ip", "address", "add", "10.255.255.1/32", "dev", "lo")  # names are not looked up without one
        names = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log"}
        options = [f"--{name}={self.folder}/{file}" for name, file in names.items()]
        self.call("munged", "--force", f"--seed-file={self.folder}/munge.seed", *options)
        self.launch("slurmctld")
        self.launch("slurmd")
        wait_for(lambda: "idle" in self.call("sinfo"), "idle node")

    def launch(self, daemon):
        self.call(daemon, "-f", str(self.folder / "slurm.conf"))

    def stop(self, daemon, how=signal.SIGTERM):
        pid = int((self.folder / f"{daemon}.pid").read_text())
        os.kill(pid, how)
        wait_for(lambda: not Path(f"/proc/{pid}/exe").exists(), f"end of {daemon}")

    def queue(self):
        return self.call("squeue", "--noheader", "--array", "--format=%F_%K %T").splitlines()

    def configure(self, line):
        with (self.folder / "slurm.conf").open("a") as file:
            file.write(f"{line}\n")
        self.call("scontrol", "reconfigure")


@pytest.fixture(scope="module")
def slurm_cluster(tmp_path_factory):
    for program in ("munged", "slurmctld", "slurmd", "ip"):
        require_program(program)
    folder = tmp_path_factory.mktemp("slurm")
    with network() as (name, before):
        cluster = Slurm(folder, before)
        cluster.start()
        yield cluster
        for daemon in ("slurmd", "slurmctld", "munged"):
            cluster.stop(daemon)
        wait_for(lambda: not processes(name), "end of Slurm")


@pytest.fixture
def slurm(slurm_cluster, tmp_path):
    """The cluster, and a place to start jobs from."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    yield slurm_cluster, Place(folder, slurm_cluster.before, SLURM_CONF=slurm_cluster.env["SLURM_CONF"])
    for line in slurm_cluster.queue():
        slurm_cluster.call("scancel", line.split()[0])
    wait_for(lambda: not slurm_cluster.queue(), "empty queue")


SLURM_FLAGS = "--engine", "slurm", "--slurm-gpus-per-task", 0


def task_log(place, task):
    return (place.folder / f"runs/.benchmark/slurm/{task}.txt").read_text()


def test_slurm_runs_what_is_missing(slurm):
    """Six cells in arrays of four at most; those that fail are shown; a second start submits those only."""
    cluster, place = slurm
    flags = *SLURM_FLAGS, "--workers", 4
    log = place.run("--env-ids", "quick", "fail", *flags, seeds=3, code=1)
    jobs = re.findall(r"(?m)^Submitted job (\d+) with (\d+) tasks$", log)
    assert [int(tasks) for _, tasks in jobs] == [4, 2]
    assert "3 of 6 done, 0 running, 3 failed" in log and "seed 2 fails on purpose" in log and "exit code 1" in log
    assert all(f"task {job}_{task} on" in task_log(place, f"{job}_{task}") for job, n in jobs for task in range(int(n)))
    for seed in (1, 2, 3):
        place.check(f"quick-{seed}", 1, 1)
    assert "Submitted" not in place.run("--env-ids", "quick", *flags, seeds=3)
    log = place.run("--env-ids", "quick", "fail", *flags, seeds=3, code=1)
    assert re.findall(r"with (\d+) tasks", log) == ["3"] and len(place.pids("fail-1")) == 2


def test_slurm_requeues_what_was_interrupted(slurm):
    """Exit code 75, whether or not the administrators have had the same thought; the signal before a time limit."""
    cluster, place = slurm
    command = "python tiny.py --steps 40"
    flags = "--env-ids", "again", "long", *SLURM_FLAGS, "--workers", 4
    (place.folder / "hold").touch()
    process = place.start(*flags, command=command)
    place.reach("long-1", 5, process)
    (job,) = re.findall(r"Submitted job (\d+)", place.log())
    cluster.call("scancel", "--batch", "--signal=TERM", f"{job}_1")  # as --signal=B:TERM@60 does
    (place.folder / "hold").unlink()
    assert process.wait(300) == 0, place.log()
    for name, task in ("again-1", 0), ("long-1", 1):
        place.check(name, 40, 2)
        assert re.findall(r"start (\d)", task_log(place, f"{job}_{task}")) == ["1", "2"]
        assert "Restarts=1 " in cluster.call("scontrol", "show", "job", f"{job}_{task}")

    cluster.configure("RequeueExit=75")
    assert re.search(r"RequeueExit\s+= 75", cluster.call("scontrol", "show", "config"))
    flags = "--env-ids", "again", *SLURM_FLAGS, "--workers", 4, "--start-seed", 2
    (job,) = re.findall(r"Submitted job (\d+)", place.run(*flags, "--slurm-detach", command=command))
    log = place.run(*flags, command=command)
    assert f"1 cell in jobs {job};" in log and "Submitted" not in log and "1 of 1 done" in log
    place.check("again-2", 40, 2)
    assert re.findall(r"start (\d)", task_log(place, f"{job}_0")) == ["1", "2"]

    flags = "--env-ids", "never", *SLURM_FLAGS, "--workers", 4, "--slurm-requeues", 1
    log = place.run(*flags, command=command, code=1)
    (job,) = re.findall(r"Submitted job (\d+) with 1 task\n", log)
    assert "0 of 1 done, 0 running, 1 failed" in log and "left the queue without a result" in log
    assert len(place.pids("never-1")) == 2 and "is left: it was started again 1 times" in task_log(place, f"{job}_0")
    assert "--slurm-requeues must be" in place.run(*flags[:-1], -1, "--workers", 0, code=2)


def test_slurm_loses_slurmd_and_the_runner(slurm):
    """kill -9 of both: the next start follows the same job, also while the controller is away. Ctrl+C stops following;
    scancel stops the job for good."""
    cluster, place = slurm
    flags, command = ("--env-ids", "long", *SLURM_FLAGS, "--workers", 4), "python tiny.py --steps 200"
    (place.folder / "hold").touch()
    first = place.start(*flags, command=command, seeds=2)
    place.reach("long-2", 5, first)
    first.kill()
    first.wait()
    (job,) = re.findall(r"Submitted job (\d+)", place.log())
    cluster.stop("slurmd", signal.SIGKILL)
    place.reach("long-1", 20)
    cluster.launch("slurmd")

    second = place.start(*flags, command=command, seeds=2)
    wait_for(lambda: f"in jobs {job};" in place.log() and "running" in str(cluster.queue()).lower(), "the job")
    cluster.stop("slurmctld")
    wait_for(lambda: "The queue does not answer" in place.log(), "notice")
    cluster.launch("slurmctld")
    wait_for(lambda: "The queue answers again" in place.log(), "notice")
    second.send_signal(signal.SIGINT)
    assert second.wait(300) == 75
    assert "Submitted" not in place.log() and f"to cancel them: scancel {job}" in place.log()
    assert len(cluster.queue()) == 2

    cluster.call("scancel", f"{job}_1")
    (place.folder / "hold").unlink()
    log = place.run(*flags, command=command, seeds=2, code=1)
    assert "1 of 2 done, 0 running, 1 failed" in log and "left the queue without a result" in log
    place.check("long-1", 200, 1)
    assert place.journal("long-2")[-1] == "checkpoint" and not cluster.queue()

    log = place.run(*flags, command=command, seeds=2)
    assert "Submitted job" in log and "2 of 2 done" in log
    place.check("long-2", 200, 2)


def test_slurm_runs_ppo(slurm):
    """The real thing, told to stop before a time limit: one run folder, two starts."""
    require("torch", "gymnasium", "tyro")
    cluster, place = slurm
    flags = *SLURM_FLAGS, "--workers", 1, "--env-ids", "CartPole-v1"
    command = f"python {ROOT}/cleanrl/ppo.py --no-cuda --total-timesteps 10240"
    process = place.start(*flags, command=command)
    wait_for(lambda: list(place.folder.glob("runs/CartPole*/events*")), "run")
    (job,) = re.findall(r"Submitted job (\d+)", place.log())
    cluster.call("scancel", "--batch", "--signal=TERM", f"{job}_0")
    assert process.wait(300) == 0, place.log()
    (record,) = place.folder.glob("runs/.benchmark/CartPole*/done.json")
    (folder,) = place.folder.glob("runs/CartPole*")
    record = json.loads(record.read_text())
    assert record["attempts"] == 2 and record["run_dir"] == f"runs/{folder.name}"


def test_slurm_script(tmp_path):
    """--workers 0 prints the script; templates are filled in, and lines without a value left out."""
    place = Place(tmp_path)
    flags = "--env-ids", "quick", "--engine", "slurm"
    printed = place.run(*flags, "--slurm-total-cpus", 10, "--slurm-ntasks", 2, "--slurm-nodes", 1, seeds=3)
    assert printed.startswith("#!/bin/bash\n") and "{{" not in printed
    for line in "array=0-2", "nodes=1", "ntasks=2", "gpus-per-task=1", "cpus-per-gpu=5", "signal=B:TERM@60", "requeue":
        assert f"\n#SBATCH --{line}\n" in printed
    assert "cpus-per-task" not in printed
    printed = place.run(*flags, "--slurm-gpus-per-task", 0, "--slurm-total-cpus", 3, "--slurm-ntasks", 2, seeds=3)
    assert "gpu" not in printed and "#SBATCH --nodes" not in printed and "#SBATCH --cpus-per-task=2\n" in printed

    template = tmp_path / "template.sh"
    template.write_text("#!/bin/sh\n#SBATCH --array={{array}}\n#SBATCH --mem=1G\n{{ command }}\n")
    printed = place.run(*flags, "--slurm-template-path", template)
    assert re.fullmatch(r"#!/bin/sh\n#SBATCH --array=0-0\n#SBATCH --mem=1G\n\S+ -I -S .* \"\$SLURM_\w+\"\n", printed)
    template.write_text("{{array}} {{command}} {{env_ids}}")
    assert "{{env_ids}}; known are array, " in place.run(*flags, "--slurm-template-path", template, code=2)
    template.write_text("{{array}}")
    assert "lacks {{command}}" in place.run(*flags, "--slurm-template-path", template, code=2)
    assert "absent.sh" in place.run(*flags, "--slurm-template-path", "absent.sh", code=2)
    log = place.run(*flags, "--workers", 1, code=2, PATH=str(Path(sys.executable).parent))
    assert "there is no sbatch here" in log


# Ray

CLUSTER = """
import json, sys
from ray.cluster_utils import Cluster

head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 10**8}
cluster = Cluster(initialize_head=True, head_node_args=head)
node = cluster.add_node(num_cpus=2, object_store_memory=10**8)
raylets = [node.all_processes["raylet"][0].process.pid for node in (cluster.head_node, node)]
print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def test_ray_loses_a_worker_and_a_node(tmp_path):
    """Their cells go on elsewhere from the checkpoints that the orphans wrote, and only when those have ended."""
    require("ray")
    with network() as (_, before):
        place, command = Place(tmp_path, before), "python tiny.py --steps 120"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": place.env}
        with subprocess.Popen([*before, sys.executable, "-c", CLUSTER], **pipes) as cluster:
            known = json.loads(cluster.stdout.readline())
            flags = "--engine", "ray", "--ray-address", known["address"], "--workers", 4
            (tmp_path / "hold").touch()
            process = place.start("--env-ids", "long", *flags, command=command, seeds=4)
            names = [f"long-{seed}" for seed in (1, 2, 3, 4)]
            for name in names:
                place.reach(name, 5, process)
            workers = {name: parent(parent(place.pids(name)[0])) for name in names}
            nodes = {name: parent(worker) for name, worker in workers.items()}
            assert sorted(nodes.values()) == sorted(2 * known["raylets"])
            victim = next(name for name in names if nodes[name] == known["raylets"][0])
            os.kill(workers[victim], signal.SIGKILL)
            wait_for(lambda: len(place.pids(victim)) == 2, "second start")
            first, second = (name for name in names if nodes[name] == known["raylets"][1])
            os.kill(known["raylets"][1], signal.SIGKILL)
            os.kill(workers[first], signal.SIGKILL)  # the other one is left to end its task
            (tmp_path / "hold").unlink()
            assert process.wait(300) == 0, place.log()
            for name in names:
                place.check(name, 120, 2 if name in (victim, first) else 1)
            log = place.run("--env-ids", "again", "fail", *flags, command="python tiny.py --steps 3", code=1)
            assert "1 of 2 done, 0 running, 1 failed" in log and "seed 1 fails on purpose" in log
            place.check("again-1", 3, 2)
            cluster.stdin.close()


def test_ray_of_its_own(tmp_path):
    """A new Ray on this machine: SIGTERM to the runner, then kill -9, leave nothing behind but checkpoints."""
    require("ray")
    flags, command = ("--env-ids", "long", "--engine", "ray", "--workers", 2), "python tiny.py --steps 80"
    with network() as (name, before):
        place = Place(tmp_path, before)
        (tmp_path / "hold").touch()
        process = place.start(*flags, command=command)
        place.reach("long-1", 5, process)
        process.terminate()
        assert process.wait(300) == 75 and "Interrupted" in place.log(), place.log()
        assert place.journal("long-1")[-1] == "checkpoint"
        wait_for(lambda: not processes(name), "end of all processes")
        process = place.start(*flags, command=command)
        wait_for(lambda: len(place.pids("long-1")) == 2, "second start")
        process.kill()
        process.wait()  # some of Ray's processes notice after a minute, but the run at once
        wait_for(lambda: not re.search("cells.py|tiny.py", str(processes(name))), "end of the run")
        assert place.journal("long-1")[-1] == "checkpoint"
        (tmp_path / "hold").unlink()
        assert "1 of 1 done" in place.run(*flags, command=command)
        place.check("long-1", 80, 3)


@pytest.mark.parametrize("engine, package", [("ray", "ray"), ("aws-batch", "boto3")])
def test_a_missing_package(engine, package, tmp_path):
    place = Place(tmp_path)
    (tmp_path / f"{package}.py").write_text("raise ImportError")
    shutil.copytree(ROOT / "cleanrl_utils", tmp_path / "cleanrl_utils")
    extra = {"ray": "ray", "boto3": "cloud"}[package]
    flags = "--aws-job-queue", "q", "--aws-job-definition", "d", "--aws-workdir", "/w"
    log = place.run("--env-ids", "quick", "--engine", engine, "--workers", 1, *flags, code=2)
    assert f'pip install -e ".[{extra}]"' in log and f"pip install {package}" in log and "Traceback" not in log


def test_no_ray_at_the_address(tmp_path):
    require("ray")
    place = Place(tmp_path)
    log = place.run("--env-ids", "quick", "--engine", "ray", "--ray-address", "127.0.0.1:9", "--workers", 1, code=2)
    assert "--ray-address 127.0.0.1:9" in log and "Traceback" not in log


# AWS Batch


@pytest.fixture(scope="module")
def batch(request):
    """moto's AWS Batch: a client, the variables that lead there, and a function that changes how jobs fare."""
    url, _, jobs = start_moto(request)
    import boto3

    keys = {"aws_access_key_id": "none", "aws_secret_access_key": "none", "region_name": "us-east-1"}
    iam, client = (boto3.client(name, endpoint_url=url, **keys) for name in ("iam", "batch"))
    role = iam.create_role(RoleName="batch", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
    environment = {"computeEnvironmentName": "here", "type": "UNMANAGED", "state": "ENABLED", "serviceRole": role}
    arn = client.create_compute_environment(**environment)["computeEnvironmentArn"]
    order = [{"order": 1, "computeEnvironment": arn}]
    client.create_job_queue(jobQueueName="queue", state="ENABLED", priority=1, computeEnvironmentOrder=order)
    container = {"image": "cleanrl", "vcpus": 1, "memory": 1000}
    client.register_job_definition(jobDefinitionName="cleanrl", type="container", containerProperties=container)
    variables = {"AWS_ACCESS_KEY_ID": "none", "AWS_SECRET_ACCESS_KEY": "none", "AWS_DEFAULT_REGION": "us-east-1"}
    return client, variables | {"AWS_ENDPOINT_URL": url}, jobs


def test_aws_batch(batch, tmp_path):
    """What is submitted does the work when a shell runs it as a container would; without it, the cells have failed."""
    client, variables, jobs = batch
    here, there = tmp_path / "here", tmp_path / "there"  # the same folder under two names, as with EFS
    here.mkdir()
    there.symlink_to(here)
    place = Place(here, **variables)
    shutil.copytree(ROOT / "cleanrl_utils", here / "cleanrl_utils")
    flags = "--env-ids", "quick", "fail", "--engine", "aws-batch", "--aws-job-queue", "queue"
    flags += "--aws-job-definition", "cleanrl", "--aws-workdir", there
    request = json.loads(place.run(*flags, seeds=2))
    assert request["arrayProperties"] == {"size": 4} and request["jobQueue"] == "queue"
    assert request["retryStrategy"]["evaluateOnExit"][0] == {"onExitCode": "75", "action": "RETRY"}

    jobs("stay")
    process = place.start(*flags, "--workers", 1, seeds=2)
    (job,) = wait_for(lambda: re.findall(r"Submitted job (\S+) with 4 tasks", place.log()), "job")
    wait_for(lambda: f"4 cells in jobs {job}\n" in place.log(), "line")
    wait_for(lambda: catches(process.pid, signal.SIGTERM), "handlers of signals")
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 75 and f"terminate-job --reason stop --job-id {job}" in place.log(), place.log()
    process = place.start(*flags, "--workers", 1, seeds=2)
    wait_for(lambda: f"4 cells in jobs {job}\n" in place.log(), "line")
    assert "Submitted" not in place.log()
    container = client.describe_jobs(jobs=[job])["jobs"][0]["container"]
    for index in range(4):
        env = place.env | {"AWS_BATCH_JOB_ARRAY_INDEX": str(index)}
        subprocess.run(container["command"], env=env, cwd="/", check=False)
    jobs("fail")
    assert process.wait(300) == 1
    assert "2 of 4 done, 0 running, 2 failed" in place.log() and "seed 2 fails on purpose" in place.log()
    for seed in (1, 2):
        place.check(f"quick-{seed}", 1, 1)

    check_lost_submission(place, jobs, flags)

    jobs("succeed")
    log = place.run("--env-ids", "quick", *flags[3:], "--workers", 1, seeds=2)
    assert "2 of 2 done" in log and "Submitted" not in log
    log = place.run("--env-ids", "other", *flags[3:], "--workers", 1, code=1)
    assert "with 1 task\n" in log and "is SUCCEEDED, without a result" in log


DYING = """
import os, sys
from cleanrl_utils import benchmark
from cleanrl_utils.engines import aws_batch

write, told = aws_batch.cells.write_json, []

def die(path, value):
    if value.get("job"):
        os._exit(9)
    write(path, value)

aws_batch.cells.write_json = die
benchmark.main()
"""


def check_lost_submission(place, jobs, flags):
    """Killed after a submission was sent and before its answer was written down: the next start finds the job."""
    jobs("stay")
    (place.folder / "dying.py").write_text(DYING)
    words = ["--command", "python tiny.py", "--num-seeds", "1", "--env-ids", "quick", "fail", "lost", *flags[3:]]
    command = [sys.executable, "dying.py", *map(str, words), "--workers", "1"]
    assert subprocess.run(command, cwd=place.folder, env=place.env, check=False).returncode == 9
    records = [json.loads(path.read_text()) for path in place.folder.glob("runs/.benchmark/aws-batch/*.json")]
    (lost,) = [record for record in records if record["job"] is None]
    assert [cell.split("__")[0] for cell in lost["cells"]] == ["fail", "lost"]
    process = place.start("--env-ids", "quick", "fail", "lost", *flags[3:], "--workers", 1)
    (job,) = wait_for(lambda: re.findall(r"2 cells in jobs (\S+)\n", place.log()), "the job that was sent")
    assert "Submitted" not in place.log()
    process.terminate()
    assert process.wait(300) == 75 and f"--job-id {job}" in place.log(), place.log()


def test_aws_batch_refuses(batch, tmp_path):
    place = Place(tmp_path, **batch[1])
    flags = "--env-ids", "quick", "--engine", "aws-batch", "--workers", 1, "--aws-job-definition", "absent"
    assert "needs --aws-job-queue" in place.run(*flags, code=2)
    flags += "--aws-job-queue", "queue", "--aws-workdir", "/work"
    assert "root of the repository" in place.run(*flags, code=2)
    shutil.copytree(ROOT / "cleanrl_utils", tmp_path / "cleanrl_utils")
    log = place.run(*flags, code=2)
    assert "benchmark: AWS Batch: " in log and "absent" in log and "Traceback" not in log
    no_keys = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
    log = place.run(*flags, code=2, **no_keys, HOME=str(tmp_path))
    assert "credentials" in log and "Traceback" not in log
