"""Where cleanrl_utils/benchmark.py runs its cells besides this machine: Slurm, Ray and AWS Batch.

    python -m cleanrl_utils.benchmark --suite benchmark/suites/classic_control.toml --engine slurm --workers 20
    python -m cleanrl_utils.benchmark --suite benchmark/suites/classic_control.toml --engine ray --workers 20
    python -m cleanrl_utils.benchmark --suite benchmark/suites/classic_control.toml --engine aws-batch --workers 20 \\
        --aws-job-queue spot --aws-job-definition cleanrl --aws-workdir /mnt/efs/cleanrl

Each engine starts `cleanrl_utils/cells.py MATRIX.json INDEX` for the cells that are missing. What became of a cell is
read from its folder (done.json, failed.json), which all machines share; the queue only says what is still to come.
See docs/advanced/engines.md.
"""

import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from cleanrl_utils import cells, fail
from cleanrl_utils.benchmark import command_of, write_matrix

TEMPLATE = Path(__file__).with_name("slurm_template.sh")
NAME = "cleanrl-"  # of a job, before the name of its list of cells
LARGEST_AWS_ARRAY = 10_000
ENDED = ("SUCCEEDED", "FAILED", "gone")  # states of AWS Batch, and ours for what it has forgotten
GRACE = 15.0  # seconds after the end of a job for its marker to be seen on a network file system


def add_arguments(parser):
    slurm = parser.add_argument_group("--engine slurm", "an array job with one task per cell; --workers at a time")
    slurm.add_argument(
        "--slurm-template-path",
        type=Path,
        default=TEMPLATE,
        metavar="FILE",
        help=f"default: {TEMPLATE.name}, see there",
    )
    slurm.add_argument("--slurm-gpus-per-task", type=int, default=1, metavar="N", help="default: 1; 0 asks for none")
    slurm.add_argument("--slurm-total-cpus", type=int, default=1, metavar="N", help="CPU cores of a cell (default: 1)")
    slurm.add_argument(
        "--slurm-ntasks", type=int, default=1, metavar="N", help="Slurm's --ntasks of a cell (default: 1)"
    )
    slurm.add_argument("--slurm-nodes", type=int, metavar="N", help="Slurm's --nodes of a cell (default: not said)")
    slurm.add_argument("--slurm-detach", action="store_true", help="submit and leave; started again, it follows")
    ray = parser.add_argument_group("--engine ray", "tasks on a Ray cluster")
    ray.add_argument(
        "--ray-address", default="", metavar="A", help="default: $RAY_ADDRESS, else a new one on this machine"
    )
    ray.add_argument("--ray-cpus-per-cell", type=float, default=1, metavar="N", help="may be a fraction (default: 1)")
    ray.add_argument(
        "--ray-gpus-per-cell", type=float, metavar="N", help="may be a fraction (default: 1 where the cluster has GPUs)"
    )
    aws = parser.add_argument_group("--engine aws-batch", "an array job; its queue says how many run at a time")
    aws.add_argument("--aws-job-queue", default="", metavar="NAME")
    aws.add_argument("--aws-job-definition", default="", metavar="NAME")
    aws.add_argument(
        "--aws-workdir", default="", metavar="DIR", help="this folder, on a shared file system, as a container sees it"
    )


def stop_signals():
    """An event that SIGINT and SIGTERM set."""
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *received: stopping.set())
    return stopping


def write_lists(matrix_path, board, indices, size, **changes):
    """Write lists of some of the cells, of `size` at most, in which a cell is known by its number in an array job.

    The state folder is in them, so that the same cells in another folder have another name.
    """
    matrix = json.loads(matrix_path.read_text()) | {"state": str(board.folder.resolve())} | changes
    parts = [indices[i : i + size] for i in range(0, len(indices), size)]
    return [(part, write_matrix(matrix | {"cells": [board.cells[i] for i in part]}, board.folder)) for part in parts]


def name_of(list_path):
    return NAME + list_path.stem.removeprefix("matrix-")


def follow(board, wanted, look, note):
    """Show what becomes of cells that run elsewhere until all have ended; True if told to stop before.

    look() says what is in the queue, index -> "waiting" or "running", or None if there is no answer this time.
    """
    stopping, begun, gone, wanted, silent = stop_signals(), time.monotonic(), {}, set(wanted), False
    while wanted and not stopping.is_set():
        queue = look()
        if (queue is None) != silent and not stopping.is_set():
            silent = queue is None
            board.clear()
            print(f"The queue {'does not answer; what is in it may go on' if silent else 'answers again'}", flush=True)
        for index in sorted(wanted):
            folder = board.folder / board.cells[index]["id"]
            if cells.is_done(folder):
                board.set(index, "done")
            elif queue is None:
                continue
            elif index in queue:
                board.set(index, queue[index])
                gone.pop(index, None)
            elif failed := cells.read_json(folder / "failed.json"):
                board.set(index, "failed", f"exit code {failed['code']}")
            elif time.monotonic() - gone.setdefault(index, time.monotonic()) > GRACE:
                folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=folder):  # makes a network file system look at the folder again
                    pass
                board.set(index, *(["done"] if cells.is_done(folder) else ["failed", note(index)]))
        wanted = {index for index in wanted if board.states[index] not in ("done", "failed")}
        board.draw()
        if wanted:
            stopping.wait(1 if time.monotonic() - begun < 60 else 5)
    return bool(wanted)


def forget_failures(board, indices):
    """A failure that is on record after this is one of the jobs that are submitted now."""
    for index in indices:
        (board.folder / board.cells[index]["id"] / "failed.json").unlink(missing_ok=True)


# Slurm


def fill(template, values):
    """A template with its {{names}} filled in; a line with one that has no value (None) is left out."""
    pattern, lines = re.compile(r"\{\{\s*(\w+)\s*\}\}"), []
    if unknown := set(pattern.findall(template)) - values.keys():
        fail(f"the Slurm template has {{{{{min(unknown)}}}}}; known are {', '.join(sorted(values))}")
    if missing := {"array", "command"} - set(pattern.findall(template)):
        fail(f"the Slurm template lacks {{{{{min(missing)}}}}}")
    for line in template.splitlines():
        if all(values[name] is not None for name in pattern.findall(line)):
            lines.append(pattern.sub(lambda match: str(values[match[1]]), line))
    return "\n".join(lines) + "\n"


def slurm_script(list_path, number, board, options):
    """The script for sbatch."""
    gpus, tasks = options.slurm_gpus_per_task, options.slurm_ntasks
    command = shlex.join(command_of(list_path, 0)[:-1])
    values = {
        "name": name_of(list_path),
        "array": f"0-{number - 1}" + (f"%{options.workers}" if options.workers else ""),
        "command": f'{command} "$SLURM_ARRAY_TASK_ID"',
        "logs": board.folder.resolve() / "slurm",
        "nodes": options.slurm_nodes,
        "ntasks": tasks,
        "gpus_per_task": gpus or None,
        "cpus_per_gpu": math.ceil(options.slurm_total_cpus / (gpus * tasks)) if gpus else None,
        "cpus_per_task": None if gpus else math.ceil(options.slurm_total_cpus / tasks),
    }
    try:
        return fill(options.slurm_template_path.read_text(), values)
    except OSError as error:
        fail(f"--slurm-template-path: {error}")


def ask(*command):
    """What a program of Slurm says, or None if the controller does not answer, which may be for a while only."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        return None
    return None if done.returncode else done.stdout


def slurm_queue(board, lists):
    """index of a cell -> (job, task, state, reason) of what is in the queue, from this start or an earlier one."""
    answer = ask("squeue", "--me", "--noheader", "--array", "--format=%F|%K|%T|%j|%r")
    if answer is None:
        return None
    numbers, found = {cell["id"]: index for index, cell in enumerate(board.cells)}, {}
    for line in answer.splitlines():
        job, task, state, name, reason = line.split("|", 4)
        if not name.startswith(NAME) or not task.isdecimal():
            continue
        if name not in lists:
            lists[name] = (cells.read_json(board.folder / f"matrix-{name.removeprefix(NAME)}.json") or {}).get(
                "cells", []
            )
        if int(task) < len(lists[name]):
            index = numbers.get(lists[name][int(task)]["id"])
            if index is not None:
                found[index] = job, task, state, reason
    return found


def slurm_submit(matrix_path, board, options, lists):
    """Submit what is missing and not in the queue already; index of a cell -> (job, task) of all of them."""
    with (board.folder / "slurm" / "lock").open("a") as file:  # one start at a time looks and submits
        cells.fcntl.flock(file, cells.fcntl.LOCK_EX)
        for attempt in range(10):
            if (queue := slurm_queue(board, lists)) is not None:
                break
            time.sleep(5)
        else:
            fail("squeue does not answer: try it by hand")
        places = {index: place[:2] for index, place in queue.items() if board.states[index] != "done"}
        missing = [index for index in board.todo() if index not in places]
        forget_failures(board, missing)
        size = re.search(r"MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config") or "")
        job = None
        for part, path in write_lists(matrix_path, board, missing, int(size[1]) if size else 1001):
            script = board.folder / "slurm" / f"{name_of(path)}.sh"
            script.write_text(slurm_script(path, len(part), board, options))
            after = [f"--dependency=afterany:{job}"] if job else []  # --workers is for all of them
            command = ["sbatch", "--parsable", f"--job-name={name_of(path)}", *after, str(script)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                fail(f"{shlex.join(command)}: {done.stderr.strip()}")
            job = done.stdout.strip().split(";")[0]
            places |= {index: (job, str(task)) for task, index in enumerate(part)}
            print(f"Submitted job {job} with {len(part)} tasks", flush=True)
    return places


def run_slurm(matrix_path, board, options):
    """An array job over the missing cells. Jobs of an earlier start that are in the queue are followed."""
    if options.workers == 0:
        for part, path in write_lists(matrix_path, board, board.todo(), 1001):
            print(slurm_script(path, len(part), board, options), end="")
        return False
    for program in ("sbatch", "squeue", "scontrol"):
        if shutil.which(program) is None:
            fail(f"there is no {program} here: start this on a machine from which jobs are submitted to Slurm")
    logs, lists, told = board.folder / "slurm", {}, set()
    logs.mkdir(parents=True, exist_ok=True)
    places = slurm_submit(matrix_path, board, options, lists)
    jobs = sorted({job for job, _ in places.values()}, key=int)
    print(
        f"In the queue: {len(places)} cells in jobs {', '.join(jobs)}; to cancel them: scancel {' '.join(jobs)}",
        flush=True,
    )

    def look():
        queue = slurm_queue(board, lists)
        for job, task, _, reason in (queue or {}).values():
            if "held" in reason.lower() and (job, task) not in told:
                told.add((job, task))
                board.clear()
                print(f"Slurm holds {job}_{task} ({reason}); to let it go: scontrol release {job}_{task}", flush=True)
        running = ("RUNNING", "COMPLETING")
        return queue and {i: "running" if place[2] in running else "waiting" for i, place in queue.items()}

    def note(index):
        return f"it left the queue without a result: {logs}/{'_'.join(places[index])}.txt"

    if options.slurm_detach:
        return False
    interrupted = follow(board, places, look, note)
    if interrupted:
        board.clear()
        print(f"The jobs go on. To follow them, the same command again; to cancel them: scancel {' '.join(jobs)}")
    return interrupted


# Ray


def ray_task(command, limits):
    """In a worker of Ray: one cell as a process that ends with the worker; its exit code and what it complained of.

    In a session of its own, as Ray kills what is in that of a dead worker before a checkpoint can be written.
    """
    options = {"env": limits | os.environ, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    done = subprocess.run([*command, str(os.getpid())], stdin=subprocess.DEVNULL, check=False, **options)
    return 128 - done.returncode if done.returncode < 0 else done.returncode, done.stderr.strip()


def start_ray(options):
    """Connect to a cluster, or start one here; Ray, and its remote function for a cell."""
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # under `uv run`, workers need our packages too
    try:
        import ray
    except ImportError:
        fail('--engine ray needs Ray: pip install -e ".[ray]" or pip install ray')
    address = options.ray_address or os.environ.get("RAY_ADDRESS", "")
    local = {"_node_ip_address": "127.0.0.1", "include_dashboard": False, "object_store_memory": 10**8}
    try:
        if ":" in address:  # a look first, as Ray tries for minutes
            host, port = address.split("://")[-1].rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address or "local", **({} if address else local), logging_level="error", log_to_driver=False)
    except (SystemExit, KeyboardInterrupt):  # the first is Ray's own answer to SIGTERM
        sys.exit(cells.INTERRUPTED)
    except (OSError, RuntimeError, ValueError) as error:
        fail(f"--ray-address {address}: {error}")
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker does not have to find this package
    has, cpus, gpus = ray.cluster_resources(), options.ray_cpus_per_cell, options.ray_gpus_per_cell
    if gpus is None:
        gpus = options.gpus_per_cell if has.get("GPU") else 0
    room = min(has.get("CPU", 0) / cpus if cpus else math.inf, has.get("GPU", 0) / gpus if gpus else math.inf)
    if room < min(options.workers, 1e9):
        print(f"The cluster has room for {int(room)} cells at a time now; the others wait", flush=True)
    threads = str(max(1, int(cpus)))
    limits = dict.fromkeys(("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NPROC"), threads)
    if 0 < gpus < 1:
        limits["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{0.9 * gpus:.3f}"
    return ray, limits, ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(ray_task)


def run_ray(matrix_path, board, options):
    """One task of Ray per cell. A cell whose worker or node is lost is started again, here and not by Ray, to count."""
    ray, limits, task = start_ray(options)
    stopping = stop_signals()
    waiting, pending, attempts = list(board.todo()), {}, {}
    while (waiting or pending) and not stopping.is_set():
        while waiting and len(pending) < options.workers:
            index = waiting.pop(0)
            pending[task.remote(command_of(matrix_path, index), limits)] = index
        ended, _ = ray.wait(list(pending), timeout=0.5)
        for future in ended:
            index = pending.pop(future)
            try:
                code, errors = ray.get(future)
            except ray.exceptions.RayError as error:
                code, errors = cells.INTERRUPTED, f"{type(error).__name__} of Ray"
            attempts[index] = attempts.get(index, 0) + 1
            if code == 0:
                board.set(index, "done")
            elif (code == cells.INTERRUPTED or code > 128) and attempts[index] <= options.retries:
                board.clear()
                print(
                    f"again       {shlex.join(board.cells[index]['command'])} ({errors or f'exit code {code}'})",
                    flush=True,
                )
                board.set(index, "waiting")
                waiting.append(index)
            else:
                board.set(index, "failed", errors or f"exit code {code}")
        for index in pending.values():
            board.set(index, "running" if board.is_locked(index) else "waiting")
    if pending:
        board.clear()
        print("Stopping: the runs write their checkpoints.", flush=True)
    stopping.clear()
    ray.shutdown()  # ends the workers, and with them the runs
    begun = time.monotonic()
    for index in pending.values():
        while board.states[index] == "running" and board.is_locked(index):
            if stopping.wait(0.1) or time.monotonic() - begun > 60:  # a second signal does not wait
                break
        board.set(index, "interrupted")
    return bool(waiting or pending)


# AWS Batch


def aws_retries(retries):
    """What Batch does when an attempt ends, in the five rules that it allows. Where none applies, it tries again.

    That is when the run did not come to an exit code: its container could not be pulled or started.
    """
    actions = [
        {"onExitCode": str(cells.INTERRUPTED), "action": "RETRY"},
        {"onExitCode": "137", "action": "RETRY"},  # SIGKILL, as when the time for a checkpoint was too short
        {"onExitCode": "143", "action": "RETRY"},  # SIGTERM, as before anything could be done about it
        {"onStatusReason": "Host EC2*", "action": "RETRY"},  # the machine was taken away
        {"onExitCode": "*", "action": "EXIT"},
    ]
    return {"attempts": max(1, min(10, retries + 1)), "evaluateOnExit": actions}  # Batch tries ten times at most


def aws_request(list_path, number, options):
    """The arguments of Batch's submit_job."""
    workdir = options.aws_workdir.rstrip("/")
    words = ["python", "-I", "-S", f"{workdir}/cleanrl_utils/cells.py"]
    words.append(f"{workdir}/{list_path.resolve().relative_to(Path.cwd())}")
    request = {
        "jobName": name_of(list_path),
        "jobQueue": options.aws_job_queue,
        "jobDefinition": options.aws_job_definition,
        "containerOverrides": {
            "command": ["sh", "-c", f'exec {shlex.join(words)} "${{AWS_BATCH_JOB_ARRAY_INDEX:-0}}"']
        },
        "retryStrategy": aws_retries(options.retries),
    }
    return request | ({"arrayProperties": {"size": number}} if number > 1 else {})


def aws_places(board, record):
    """index of a cell -> the name that Batch has for its task, of one submission."""
    numbers = {cell["id"]: index for index, cell in enumerate(board.cells)}
    listed, job = record["cells"], record["job"]
    places = {numbers.get(cell): f"{job}:{i}" if len(listed) > 1 else job for i, cell in enumerate(listed)}
    return {index: place for index, place in places.items() if index is not None}


def aws_states(client, tasks):
    """task -> its status and the reason, or None without an answer; that of the job for one that is not there yet."""
    import botocore.exceptions

    found, names = {}, sorted({name for task in tasks for name in (task, task.split(":")[0])})
    try:
        for i in range(0, len(names), 100):
            for job in client.describe_jobs(jobs=names[i : i + 100])["jobs"]:
                found[job["jobId"]] = job["status"], job.get("statusReason", "")
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError):
        return None
    gone = "gone", ""  # after a week or so
    return {task: found.get(task) or found.get(task.split(":")[0]) or gone for task in tasks}


def aws_submit(client, matrix_path, board, options):
    """Submit what is missing and not in the queue already; index of a cell -> task, and the jobs."""
    with (board.folder / "aws-batch" / "lock").open("a") as file:  # one start at a time looks and submits
        cells.fcntl.flock(file, cells.fcntl.LOCK_EX)
        records = [cells.read_json(path) for path in sorted((board.folder / "aws-batch").glob("*.json"))]
        places, jobs = {}, {}
        for record in records:
            earlier = {
                index: task for index, task in aws_places(board, record).items() if board.states[index] != "done"
            }
            if (states := aws_states(client, list(earlier.values()))) is None:
                fail("AWS Batch does not answer: try aws batch describe-jobs by hand")
            alive = {index: task for index, task in earlier.items() if states[task][0] not in ENDED}
            jobs |= {record["job"]: None} if alive else {}
            places |= alive
        missing = [index for index in board.todo() if index not in places]
        forget_failures(board, missing)
        for part, path in write_lists(matrix_path, board, missing, LARGEST_AWS_ARRAY, cwd=options.aws_workdir):
            job = client.submit_job(**aws_request(path, len(part), options))["jobId"]
            record = {"job": job, "cells": [board.cells[index]["id"] for index in part]}
            cells.write_json(board.folder / "aws-batch" / f"{name_of(path)}.json", record)
            places |= aws_places(board, record)
            jobs[job] = None
            print(f"Submitted job {job} with {len(part)} tasks", flush=True)
    return places, list(jobs)


def run_aws_batch(matrix_path, board, options):
    """Array jobs over the missing cells. Jobs of an earlier start that have not ended are followed."""
    for flag in ("aws_job_queue", "aws_job_definition", "aws_workdir"):
        if not getattr(options, flag):
            fail(f"--engine aws-batch needs --{flag.replace('_', '-')}")
    if not Path("cleanrl_utils/cells.py").exists() or not board.folder.resolve().is_relative_to(Path.cwd()):
        fail("start this in the root of the repository, with --state in it: containers see nothing else")
    if options.workers == 0:
        lists = write_lists(matrix_path, board, board.todo(), LARGEST_AWS_ARRAY, cwd=options.aws_workdir)
        for part, path in lists:
            print(json.dumps(aws_request(path, len(part), options), indent=2))
        return False
    try:
        import boto3
        import botocore.exceptions
    except ImportError:
        fail('--engine aws-batch needs boto3: pip install -e ".[cloud]" or pip install boto3')
    (board.folder / "aws-batch").mkdir(parents=True, exist_ok=True)
    try:
        client = boto3.client("batch")
        places, jobs = aws_submit(client, matrix_path, board, options)
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        fail(f"AWS Batch: {error}")
    print(f"In the queue: {len(places)} cells in jobs {', '.join(jobs)}", flush=True)
    seen = {}

    def look():
        states = aws_states(client, [places[i] for i in places if board.states[i] not in ("done", "failed")])
        seen.update(states or {})
        if states is None:
            return None
        tasks = {index: states[task][0] for index, task in places.items() if task in states}
        running = ("STARTING", "RUNNING")
        return {i: "running" if state in running else "waiting" for i, state in tasks.items() if state not in ENDED}

    def note(index):
        status, reason = seen[places[index]]
        return f"job {places[index]} is {status} {reason}".strip() + ", without a result in the folder of the cell"

    interrupted = follow(board, places, look, note)
    if interrupted:
        board.clear()
        print("The jobs go on. To follow them, the same command again; to end them:")
        for job in jobs:
            print(f"    aws batch terminate-job --reason stop --job-id {job}")
    return interrupted
