"""AWS Batch: array jobs in containers that see this folder on a shared file system."""

import json
import shlex
from pathlib import Path

from cleanrl_utils import counted, fail
from cleanrl_utils.engines import cells
from cleanrl_utils.engines.queues import follow, forget_failures, name_of, write_lists

LARGEST_ARRAY = 10_000
ENDED = ("SUCCEEDED", "FAILED", "gone")  # states of AWS Batch, and ours for what it has forgotten


def add_arguments(parser):
    group = parser.add_argument_group("--engine aws-batch", "an array job; its queue says how many run at a time")
    group.add_argument("--aws-job-queue", default="", metavar="NAME")
    group.add_argument("--aws-job-definition", default="", metavar="NAME")
    group.add_argument(
        "--aws-workdir", default="", metavar="DIR", help="this folder, on a shared file system, as a container sees it"
    )


def retry_strategy(retries):
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


def request_for(list_path, number, options):
    """The arguments of Batch's submit_job."""
    workdir = options.aws_workdir.rstrip("/")
    words = ["python", "-I", "-S", f"{workdir}/cleanrl_utils/engines/cells.py"]
    words.append(f"{workdir}/{list_path.resolve().relative_to(Path.cwd())}")
    request = {
        "jobName": name_of(list_path),
        "jobQueue": options.aws_job_queue,
        "jobDefinition": options.aws_job_definition,
        "containerOverrides": {
            "command": ["sh", "-c", f'exec {shlex.join(words)} "${{AWS_BATCH_JOB_ARRAY_INDEX:-0}}"']
        },
        "retryStrategy": retry_strategy(options.retries),
    }
    return request | ({"arrayProperties": {"size": number}} if number > 1 else {})


def places_of(board, record):
    """index of a cell -> the name that Batch has for its task, of one submission."""
    numbers = {cell["id"]: index for index, cell in enumerate(board.cells)}
    listed, job = record["cells"], record["job"]
    places = {numbers.get(cell): f"{job}:{i}" if len(listed) > 1 else job for i, cell in enumerate(listed)}
    return {index: place for index, place in places.items() if index is not None}


def states_of(client, tasks):
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


def read_records(client, folder):
    """What was submitted. A job that its start was killed before it could write it down is looked up by its name."""
    for path in sorted(folder.glob("*.json")):
        record = cells.read_json(path)
        if record and not record["job"]:
            named = [{"name": "JOB_NAME", "values": [path.stem]}]
            found = client.list_jobs(jobQueue=record["queue"], filters=named)["jobSummaryList"]
            newest = max(found, key=lambda job: job.get("createdAt", 0), default={})
            record["job"] = newest.get("jobId")
        if record and record["job"]:
            yield record


def submit(client, matrix_path, board, options):
    """Submit what is missing and not in the queue already; index of a cell -> task, and the jobs."""
    with (board.folder / "aws-batch" / "lock").open("a") as file:  # one start at a time looks and submits
        cells.fcntl.flock(file, cells.fcntl.LOCK_EX)
        records = list(read_records(client, board.folder / "aws-batch"))
        places, jobs = {}, {}
        for record in records:
            earlier = {index: task for index, task in places_of(board, record).items() if board.states[index] != "done"}
            if (states := states_of(client, list(earlier.values()))) is None:
                fail("AWS Batch does not answer: try aws batch describe-jobs by hand")
            alive = {index: task for index, task in earlier.items() if states[task][0] not in ENDED}
            jobs |= {record["job"]: None} if alive else {}
            places |= alive
        missing = [index for index in board.todo() if index not in places]
        forget_failures(board, missing)
        for part, path in write_lists(matrix_path, board, missing, LARGEST_ARRAY, cwd=options.aws_workdir):
            request, place = request_for(path, len(part), options), board.folder / "aws-batch" / f"{name_of(path)}.json"
            record = {"job": None, "queue": request["jobQueue"], "cells": [board.cells[index]["id"] for index in part]}
            cells.write_json(place, record)  # before it is sent, or nobody would know of it if this is killed
            record["job"] = job = client.submit_job(**request)["jobId"]
            cells.write_json(place, record)
            places |= places_of(board, record)
            jobs[job] = None
            print(f"Submitted job {job} with {counted(len(part), 'task')}", flush=True)
    return places, list(jobs)


def check(board, options):
    for flag in ("aws_job_queue", "aws_job_definition", "aws_workdir"):
        if not getattr(options, flag):
            fail(f"--engine aws-batch needs --{flag.replace('_', '-')}")
    if not Path("cleanrl_utils/engines/cells.py").exists() or not board.folder.resolve().is_relative_to(Path.cwd()):
        fail("start this in the root of the repository, with --state in it: containers see nothing else")


def show(matrix_path, board, options):
    """The requests that would be sent."""
    check(board, options)
    for part, path in write_lists(matrix_path, board, board.todo(), LARGEST_ARRAY, cwd=options.aws_workdir):
        print(json.dumps(request_for(path, len(part), options), indent=2))


def run(matrix_path, board, options):
    """Array jobs over the missing cells. Jobs of an earlier start that have not ended are followed."""
    check(board, options)
    try:
        import boto3
        import botocore.exceptions
    except ImportError:
        fail('--engine aws-batch needs boto3: pip install -e ".[cloud]" or pip install boto3')
    (board.folder / "aws-batch").mkdir(parents=True, exist_ok=True)
    try:
        client = boto3.client("batch")
        places, jobs = submit(client, matrix_path, board, options)
    except (botocore.exceptions.BotoCoreError, botocore.exceptions.ClientError) as error:
        fail(f"AWS Batch: {error}")
    print(f"In the queue: {counted(len(places), 'cell')} in jobs {', '.join(jobs)}", flush=True)
    seen = {}

    def look():
        states = states_of(client, [places[i] for i in places if board.states[i] not in ("done", "failed")])
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
