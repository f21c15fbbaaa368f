"""Send experiments to AWS Batch; what they write is kept in S3, and Spot machines may be taken away at any time.

    python -m cleanrl_utils.submit_exp --suite benchmark/suites/classic_control.toml \\
        --bucket BUCKET --queue cleanrl-spot --definition cleanrl-cpu
    python -m cleanrl_utils.submit_exp --command "python cleanrl/ppo.py --no-cuda" --env-ids CartPole-v1 \\
        --num-seeds 3 --bucket BUCKET --queue cleanrl-spot --definition cleanrl-cpu --vcpus 1 --memory 2048
    python -m cleanrl_utils.submit_exp --status s3://BUCKET/cleanrl
    python -m cleanrl_utils.submit_exp --fetch s3://BUCKET/cleanrl --out runs
    python -m cleanrl_utils.submit_exp --cancel s3://BUCKET/cleanrl

What is to be run is written as for cleanrl_utils.benchmark. The plan and an estimate of its cost are shown, and the
question asked, before anything is submitted. Cells that are done, or in a queue, are left alone: the same command again
submits what is missing. Each cell is run by cleanrl_utils/engines/s3_worker.py. See docs/cloud/submit-experiments.md.

Exit codes: 0 submitted, fetched, cancelled, or every cell is done; 1 some cells failed, or the answer was no; 2 wrong
usage, or AWS says no; 75 (--status) some cells are still to come.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import secrets
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cleanrl_utils import counted, fail
from cleanrl_utils.engines import aws_batch, cells, costs, s3_worker, tags
from cleanrl_utils.engines.matrix import make_cells
from cleanrl_utils.engines.queues import NAME

SECRET_NAME = re.compile(r"key|token|secret|passw|credential", re.I)
SECRET_FLAG = re.compile(r"-.*(key|token|secret|password)", re.I)
KNOWN_FORMS = (
    r"\b(AKIA|ASIA)[A-Z0-9]{16}\b|\b(hf|ghp|gho|github_pat|glpat|sk|xox[bp])[_-]\w{16,}|-----BEGIN|://[^/\s]*:[^/\s]+@"
)
RANDOM_FORMS = r"^([0-9a-f]{40}|[A-Za-z0-9/+]{40})$"  # keys of W&B and of AWS, but also the name of a commit
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "NPROC")
ALIVE = ("SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING")  # of a job of Batch
ENDED = ("SUCCEEDED", "FAILED")


def check_names(matrix):
    """Runs are named by environment, --exp-name, seed and second; W&B would take two of one name for one run."""
    names = {}
    for cell in [cell for cell in matrix if "--track" in cell["command"]]:
        script, words = cells.script_of(cell["command"])[1], " ".join(cell["command"])
        given = re.findall(r"--exp[-_]name[ =](\S+)", words) or [Path(script or "").stem]
        other = names.setdefault((cell["env_id"], given[-1], cell["seed"]), cell)
        if other is not cell:
            fail(f"tell these apart with --exp-name, or W&B may mix them: {words} | {' '.join(other['command'])}")


def check_secrets(matrix, variables):
    """Refuse what looks like a secret: requests, lists and logs can be read by many. Its value is not repeated."""
    advice = "name it in the secrets of the job definition instead (docs/cloud/submit-experiments.md)"
    ours = {value for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= 8}
    for name, value in variables.items():
        if SECRET_NAME.search(name) or re.search(f"{KNOWN_FORMS}|{RANDOM_FORMS}", value) or value in ours:
            fail(f"--env {name} looks like a secret: {advice}")
    for cell in matrix:
        words = [part for word in cell["command"] for part in word.split("=", 1)]
        for before, word in zip(["", *words], words):
            named = SECRET_FLAG.fullmatch(before) and not word.startswith("-")
            if named or re.search(KNOWN_FORMS, word) or any(secret in word for secret in ours):
                fail(f"the command for {cell['env_id']} seems to hold a secret, after {before}: {advice}")


def read_variables(pairs):
    """--env NAME=VALUE ... as a dictionary. Nothing else of this environment travels."""
    variables = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            fail(f"--env takes NAME=VALUE, not {name}")
        variables[name] = value
    return variables


def request_of(url, number, options, vcpus):
    """The arguments of Batch's submit_job for a list of cells, under a name of its own."""
    command = ["python", "-m", "cleanrl_utils.engines.s3_worker", url, "--sync-every", f"{options.sync_every:g}"]
    sizes = {"VCPU": options.vcpus, "MEMORY": options.memory, "GPU": options.gpus}
    variables = dict.fromkeys(THREADS, str(max(1, int(vcpus)))) if vcpus else {}
    variables |= read_variables(options.env)
    overrides = {
        "command": command,
        "environment": [{"name": name, "value": value} for name, value in variables.items()],
        "resourceRequirements": [{"type": name, "value": str(size)} for name, size in sizes.items() if size],
    }
    request = {
        "jobName": f"{NAME}{Path(url).stem.removeprefix('matrix-')}-{secrets.token_hex(4)}",
        "jobQueue": options.queue,
        "jobDefinition": options.definition,
        "containerOverrides": {name: value for name, value in overrides.items() if value},
        "retryStrategy": aws_batch.retry_strategy(options.retries),
        "timeout": {"attemptDurationSeconds": max(60, int(options.timeout * 3600))},
    }
    return request | ({"arrayProperties": {"size": number}} if number > 1 else {})


def lists_of(matrix, bucket, prefix):
    """Lists of cells for array jobs: (url, cells), under a name that is the same for the same list."""
    size = aws_batch.LARGEST_ARRAY
    for part in [matrix[i : i + size] for i in range(0, len(matrix), size)]:
        key = hashlib.sha256(json.dumps(part).encode()).hexdigest()[:10]
        yield f"s3://{bucket}/{prefix}/matrix-{key}.json", part


# What is in S3 and in the queues


def keys_under(s3, bucket, prefix):
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


def read_all(s3, bucket, keys):
    """What `read_state` says of many objects."""
    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda key: s3_worker.read_state(s3, bucket, key), keys))


def read_jobs(s3, batch, bucket, prefix):
    """The records of what was submitted, oldest first; one that its submitter could not complete is looked up."""
    found = []
    for record, _, age in read_all(s3, bucket, keys_under(s3, bucket, f"{prefix}/jobs/")):
        if record and not record["job"]:
            named = [{"name": "JOB_NAME", "values": [record["name"]]}]
            with contextlib.suppress(*s3_worker.errors()):  # a queue that is gone
                jobs = batch.list_jobs(jobQueue=record["queue"], filters=named)["jobSummaryList"]
                record["job"] = jobs[0]["jobId"] if jobs else None
        found += [(age, record)] if record and record["job"] else []
    return [record for _, record in sorted(found, key=lambda pair: -pair[0])]


def known_cells(s3, url):
    """The bucket, the prefix and the cells of s3://BUCKET/PREFIX, or of one list in it."""
    bucket, key = s3_worker.split_url(url)
    if key.endswith(".json"):
        matrix, prefix = s3_worker.read_matrix(s3, url)
        return bucket, prefix, matrix
    found = {}
    for matrix, _, _ in read_all(s3, bucket, keys_under(s3, bucket, f"{key}/matrix-")):
        found |= {cell["id"]: cell for cell in matrix["cells"]}
    if not found:
        raise ValueError(f"nothing was submitted with {url}")
    return bucket, key, s3_worker.check_names(list(found.values()), url)


def survey(s3, batch, bucket, prefix, matrix):
    """(standing, note, state) of each cell; the standing is done, running, waiting, failed or new."""
    tasks = {}
    for record in read_jobs(s3, batch, bucket, prefix):
        for i, cell in enumerate(record["cells"]):
            tasks.setdefault(cell, []).append(f"{record['job']}:{i}" if len(record["cells"]) > 1 else record["job"])
    states = read_all(s3, bucket, [s3_worker.state_key(prefix, cell["id"]) for cell in matrix])
    missing = [cell["id"] for cell, (state, _, _) in zip(matrix, states) if (state or {}).get("state") != "done"]
    jobs = aws_batch.states_of(batch, [task for name in missing for task in tasks.get(name, [])])
    if jobs is None:
        print("submit_exp: AWS Batch does not answer; what is in its queues is not known", file=sys.stderr)
    found = []
    for cell, (state, _, age) in zip(matrix, states):
        ours = tasks.get(cell["id"], [])
        told = {task: (jobs or {}).get(task, ("", "")) for task in ours}
        task = next((task for task in ours if told[task][0] in ALIVE), ours[-1] if ours else None)
        status, reason = told.get(task, ("", ""))
        how = (state or {}).get("state")
        if how == "done":
            standing, note = "done", f"{state['seconds'] / 3600:.2f} h"
        elif how == "running" and age < state["lease"] and told.get(state["owner"]["job"], [""])[0] not in ENDED:
            standing, note = "running", (state.get("log", "").splitlines() or [""])[-1].strip()
        elif status in ALIVE or (jobs is None and task):
            standing, note = "waiting", f"job {task} is {status or 'in the queue, maybe'} {reason}".strip()
        elif how == "failed":
            standing, note = "failed", f"exit code {state['code']}"
        elif task:
            standing, note = "failed", f"job {task} is {status} {reason}".strip()
        else:
            standing, note = "new", "interrupted, and not submitted" if state else "not submitted"
        found.append((standing, note, state))
    return found


def show_status(s3, batch, url):
    bucket, prefix, matrix = known_cells(s3, url)
    found = survey(s3, batch, bucket, prefix, matrix)
    for cell, (standing, note, state) in zip(matrix, found):
        starts = (state or {}).get("starts", 0)
        print(f"{standing:8} {cell['id']}: {note}" + (f" ({starts} starts)" if starts > 1 else ""))
        if standing == "failed":
            print("".join(f"    {line}\n" for line in (state or {}).get("log", "").splitlines()), end="")
    standings = [standing for standing, _, _ in found]
    count = {name: standings.count(name) for name in ("done", "running", "waiting", "failed", "new")}
    print(
        f"{counted(len(found), 'cell')}: " + ", ".join(f"{number} {name}" for name, number in count.items() if number)
    )
    return 1 if count["failed"] else 0 if count["done"] == len(found) else cells.INTERRUPTED


def fetch(s3, url, out):
    """Get the run folders, and the records of the cells, as the benchmark runner has them; what is new of them."""
    bucket, prefix, matrix = known_cells(s3, url)
    code = 0
    for cell in matrix:
        try:
            state, number = fetch_cell(s3, bucket, s3_worker.state_key(prefix, cell["id"]), cell["id"], out)
            print(f"{state:12} {cell['id']}: {number} new files")
        except OSError as error:
            print(f"submit_exp: {cell['id']} is not complete: {error}", file=sys.stderr)
            code = 1
    return code


def fetch_cell(s3, bucket, key, cell_id, out):
    """Its state and how many files are new. A run folder of a name that another has here gets another name."""
    record = out / ".benchmark" / cell_id
    before = cells.read_json(record / "fetched.json") or {"files": {}, "names": {}}
    names, own = before["names"], (cells.read_json(record / "begun.json") or {}).get("run_dir")

    def place(path):
        first, *rest = Path(path).parts[1:]
        if first not in names:
            taken = first != ".benchmark" and f"runs/{first}" != own and (out / first).exists()
            names[first] = f"{first}-{cell_id.rsplit('__', 1)[-1]}" if taken else first
        return Path(out, names[first], *rest)

    for attempt in range(5):
        state = s3_worker.read_state(s3, bucket, key)[0] or {"state": "new", "files": {}}
        files = state["files"]
        places = {path: place(path) for path in sorted(before["files"] | files)}
        new = {path: at for path, at in files.items() if before["files"].get(path) != at or not places[path].exists()}
        if new:  # first of all the names, or a second start would take these folders for those of others
            record.mkdir(parents=True, exist_ok=True)
            cells.write_json(record / "fetched.json", {"files": before["files"], "names": names})
        try:
            s3_worker.download(s3, bucket, new, place)
            break
        except OSError:  # such as 404 for what was replaced in the meantime by the worker of a cell
            if attempt == 4:
                raise
    for path in sorted(before["files"].keys() - files.keys(), reverse=True):
        with contextlib.suppress(OSError):
            places[path].unlink(missing_ok=True)
            places[path].parent.rmdir()  # unless there is more in it
    for path in record.glob("*.json") if new else []:
        content = cells.read_json(path) or {}
        name = Path(content.get("run_dir") or "").name
        if names.get(name, name) != name:
            cells.write_json(path, content | {"run_dir": f"runs/{names[name]}"})
    if files != before["files"]:
        cells.write_json(record / "fetched.json", {"files": files, "names": names})
    return state["state"], len(new)


def cancel(s3, batch, url, sure):
    """End what was submitted, or the jobs of one list. The runs write checkpoints, and can be submitted again."""
    bucket, prefix, _ = known_cells(s3, url)
    records = read_jobs(s3, batch, bucket, prefix)
    if url.endswith(".json"):
        records = [record for record in records if record["url"] == url]
    states = aws_batch.states_of(batch, [record["job"] for record in records])
    if states is None:
        fail("AWS Batch does not answer: try aws batch describe-jobs by hand")
    alive = [record for record in records if states[record["job"]][0] in ALIVE]
    print(f"{counted(len(alive), 'job')} to end")
    for record in alive:
        print(f"  {record['job']} in {record['queue']}: {counted(len(record['cells']), 'cell')} of {record['url']}")
    if alive and not sure:
        confirm("End them?")
    for record in alive:
        batch.terminate_job(jobId=record["job"], reason="submit_exp --cancel")


# Submission


def confirm(question):
    if not sys.stdin.isatty():
        fail("there is nobody to ask: say --yes")
    try:
        answer = input(f"{question} [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() not in ("y", "yes"):
        print("Nothing was done.")
        sys.exit(1)


def check_places(s3, batch, options):
    """The bucket, queue and definition exist; the vCPUs, the MiB and the GPUs that a cell will have."""
    s3.list_objects_v2(Bucket=options.bucket, Prefix=f"{options.prefix}/", MaxKeys=1)
    queues = batch.describe_job_queues(jobQueues=[options.queue])["jobQueues"]
    if not queues:
        fail(f"there is no job queue {options.queue} in {batch.meta.region_name}")
    if queues[0]["state"] != "ENABLED":
        fail(f"the job queue {options.queue} is {queues[0]['state']}")
    name, _, revision = options.definition.rsplit("/", 1)[-1].partition(":")  # also of an ARN
    pages = batch.get_paginator("describe_job_definitions").paginate(jobDefinitionName=name, status="ACTIVE")
    listed = [found for page in pages for found in page["jobDefinitions"]]
    listed = [found for found in listed if revision in ("", str(found["revision"]))]
    if not listed:
        fail(f"there is no active job definition {options.definition} in {batch.meta.region_name}")
    container = max(listed, key=lambda found: found["revision"]).get("containerProperties", {})
    sizes = {"VCPU": container.get("vcpus", 1), "MEMORY": container.get("memory", 0), "GPU": 0}
    sizes |= {entry["type"]: float(entry["value"]) for entry in container.get("resourceRequirements", [])}
    return options.vcpus or sizes["VCPU"], options.memory or sizes["MEMORY"], options.gpus or sizes["GPU"]


def price_of(batch, options, vcpus, memory, gpus):
    if options.price_per_hour is not None:
        return options.price_per_hour, f"${options.price_per_hour:g} for a cell and hour (--price-per-hour)"
    if options.price_per_vcpu_hour is not None and vcpus:
        price = options.price_per_vcpu_hour * vcpus
        return price, f"${price:.4g} for a cell and hour: {vcpus:g} vCPUs (--price-per-vcpu-hour)"
    if batch is None:
        return None, "unknown: give --price-per-hour, or --price-per-vcpu-hour and --vcpus"
    sizes, region = (vcpus, memory, gpus), batch.meta.region_name
    try:
        return costs.asked_price(batch, options.queue, options.instance_type, *sizes, region)
    except s3_worker.errors() as error:
        return None, f"unknown: give --price-per-vcpu-hour (AWS: {' '.join(str(error).split())[:200]})"


def show_plan(matrix, skipped, measured, batch, options, vcpus, memory, gpus):
    """What would be submitted, and what it would cost."""
    say = sys.stderr if options.dry_run else sys.stdout
    print(
        f"{counted(len(matrix), 'cell')} for {options.queue} ({options.definition}); not again: {skipped or 'none'}",
        file=say,
    )
    attempts = aws_batch.retry_strategy(options.retries)["attempts"]
    known = f"{vcpus:g} vCPUs" if vcpus else "vCPUs of the definition, unknown here: give --vcpus"
    known += f", {memory:g} MiB" * bool(memory) + f", {gpus:g} GPUs" * bool(gpus)
    print(f"  {attempts} attempts at most, {options.timeout:g} h each; a cell: {known}", file=say)
    print("Cost estimate:", file=say)
    local = costs.local_speeds({costs.kind(cell) for cell in matrix}, "runs")
    hours = costs.hours_of(matrix, measured, local, options.hours_per_cell)
    price = price_of(batch, options, vcpus, memory, gpus)
    for line in costs.lines_of(*hours, *price, attempts, options.timeout):
        print(line, file=say)


def submit(s3, batch, matrix, options):
    bucket, prefix = options.bucket, options.prefix
    sizes = check_places(s3, batch, options)
    found = survey(s3, batch, bucket, prefix, matrix)
    missing = [cell for cell, (standing, _, _) in zip(matrix, found) if standing in ("new", "failed")]
    standings = [standing for standing, _, _ in found]
    counts = [f"{standings.count(name)} {name}" for name in ("done", "running", "waiting") if name in standings]
    if not missing:
        print(f"Nothing to submit: {', '.join(counts)}")
        return
    measured = costs.measured_speeds(matrix, [state for _, _, state in found])
    show_plan(missing, ", ".join(counts), measured, batch, options, *sizes)
    if not options.yes:
        confirm("Submit?")
    for url, part in lists_of(missing, bucket, prefix):
        s3.put_object(Bucket=bucket, Key=s3_worker.split_url(url)[1], Body=json.dumps({"cells": part}, indent=1))
        request = request_of(url, len(part), options, sizes[0])
        record = {"job": None, "name": request["jobName"], "queue": options.queue, "url": url}
        record["cells"] = [cell["id"] for cell in part]
        place = {"Bucket": bucket, "Key": f"{prefix}/jobs/{request['jobName']}.json"}
        s3.put_object(**place, Body=json.dumps(record, indent=1))  # before, or nobody would know of the job
        record["job"] = batch.submit_job(**request)["jobId"]
        s3.put_object(**place, Body=json.dumps(record, indent=1))
        print(f"Submitted job {record['job']} with {counted(len(part), 'cell')}: {url}", flush=True)
    again = f"python -m cleanrl_utils.submit_exp --status s3://{bucket}/{prefix}"
    print(f"To see what becomes of them: {again}\nTo get the runs: {again.replace('--status', '--fetch')}")
    print(f"To end them: {again.replace('--status', '--cancel')}")


def parse_args():
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_utils.submit_exp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to run")
    what.add_argument("--suite", metavar="FILE", help="a TOML file of commands and environments: benchmark/suites")
    what.add_argument("--command", default="", help='what to run, such as "python cleanrl/ppo.py --no-cuda"')
    what.add_argument("--env-ids", nargs="+", default=[], metavar="ID", help="environments to run --command in")
    what.add_argument("--num-seeds", "--num-seed", type=int, metavar="N", help="seeds per environment (default: 3)")
    what.add_argument("--start-seed", type=int, metavar="N", help="the first seed (default: 1)")
    where = parser.add_argument_group("where")
    where.add_argument("--bucket", default="", help="the bucket of S3 for lists, checkpoints and runs")
    where.add_argument("--prefix", default="cleanrl", help="of everything in the bucket (default: cleanrl)")
    where.add_argument("--queue", "--job-queue", default="", metavar="NAME", help="the job queue of AWS Batch")
    where.add_argument("--definition", "--job-definition", default="", metavar="NAME", help="NAME or NAME:REVISION")
    where.add_argument("--region", help="default: as for all tools of AWS: AWS_DEFAULT_REGION, ~/.aws/config")
    how = parser.add_argument_group("how", "sizes of a cell that are not given are those of the job definition")
    how.add_argument("--vcpus", "--num-vcpu", type=int, metavar="N", help="vCPUs of a cell")
    how.add_argument("--memory", "--num-memory", type=int, metavar="MIB", help="memory of a cell in MiB")
    how.add_argument("--gpus", "--num-gpu", type=int, metavar="N", help="GPUs of a cell")
    how.add_argument("--timeout", "--num-hours", type=float, default=24, metavar="H", help="hours an attempt: 24")
    how.add_argument("--retries", type=int, default=9, metavar="N", help="after interruptions, 9 at most: 9")
    how.add_argument("--sync-every", type=float, default=60, metavar="S", help="seconds between copies to S3: 60")
    how.add_argument("--env", nargs="+", default=[], metavar="NAME=VALUE", help="variables of the runs; no secrets")
    how.add_argument("--yes", action="store_true", help="do not ask")
    how.add_argument("--dry-run", action="store_true", help="print the requests, with every cell; AWS is not asked")
    tags.add_arguments(parser)
    cost = parser.add_argument_group("cost estimate")
    cost.add_argument("--hours-per-cell", type=float, metavar="H", help="default: from measured speeds")
    cost.add_argument("--price-per-vcpu-hour", type=float, metavar="USD")
    cost.add_argument("--price-per-hour", type=float, metavar="USD", help="of a cell")
    cost.add_argument("--instance-type", metavar="TYPE", help="to ask AWS for; default: those of the queue")
    later = parser.add_argument_group("afterwards", "URL is s3://BUCKET/PREFIX, or one list of cells in it")
    one = later.add_mutually_exclusive_group()
    one.add_argument("--status", metavar="URL", help="how the cells stand, and the ends of the logs of failed ones")
    one.add_argument("--fetch", metavar="URL", help="get the run folders, also of cells that are not done")
    one.add_argument("--cancel", metavar="URL", help="end the jobs; the runs write checkpoints")
    later.add_argument("-o", "--out", type=Path, default=Path("runs"), metavar="DIR", help="for --fetch: runs")
    return parser.parse_args()


def check(options):
    if bool(options.command) != bool(options.env_ids) or not (options.command or options.suite):
        fail("what to run? --command and --env-ids, or --suite; or --status, --fetch, --cancel")
    for name in ("bucket", "queue", "definition"):
        if not getattr(options, name):
            fail(f"--{name} is missing")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]+", options.bucket) or not options.prefix:
        fail("--bucket takes the name of a bucket alone, such as my-experiments, and --prefix the rest")
    positive = {"timeout": options.timeout, "sync-every": options.sync_every, "num-seeds": options.num_seeds}
    positive |= {"vcpus": options.vcpus, "memory": options.memory, "gpus": options.gpus}
    for name, value in positive.items():
        if value is not None and value <= 0:
            fail(f"--{name} must be above 0")
    if not 0 <= options.retries <= 9:
        fail("--retries must be between 0 and 9: Batch tries ten times at most")


def main():
    options = parse_args()
    options.prefix = options.prefix.strip("/")
    url = options.status or options.fetch or options.cancel
    if not url:
        check(options)
        matrix = make_cells(options)
        check_names(matrix)
        if not any(pair.startswith("WANDB_TAGS=") for pair in options.env):
            options.env += [f"{name}={value}" for name, value in tags.variables_of(matrix, options).items()]
        check_secrets(matrix, read_variables(options.env))
        if options.dry_run:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # for `| head`
            show_plan(matrix, "", {}, None, options, options.vcpus or 0, options.memory or 0, options.gpus or 0)
            print("The lists that the requests name are not in S3: only a submission writes them.", file=sys.stderr)
            for place, part in lists_of(matrix, options.bucket, options.prefix):
                print(json.dumps(request_of(place, len(part), options, options.vcpus), indent=2))
            return
    try:
        known = s3_worker.errors()
    except ImportError:
        fail('AWS needs boto3: pip install -e ".[cloud]" or pip install boto3')
    try:
        s3 = s3_worker.connect("s3", region_name=options.region)
        batch = None if options.fetch else s3_worker.connect("batch", region_name=options.region)
        if options.status:
            sys.exit(show_status(s3, batch, url))
        elif options.fetch:
            sys.exit(fetch(s3, url, options.out))
        elif options.cancel:
            cancel(s3, batch, url, options.yes)
        else:
            submit(s3, batch, matrix, options)
    except ValueError as error:
        fail(error)
    except known as error:
        fail(explain(error, options))


def explain(error, options):
    """What to do about an error of AWS, in one line."""
    name, words = type(error).__name__, " ".join(str(error).split())
    if name == "NoRegionError":
        return "no region: say --region, or set AWS_DEFAULT_REGION"
    if "Credential" in name:
        return f"{words}: log in with `aws configure` or `aws sso login`, or use a machine with a role"
    code = getattr(error, "response", {}).get("Error", {}).get("Code", "")
    if code == "NoSuchBucket":
        return f"there is no bucket {options.bucket or options.status or options.fetch or options.cancel}"
    return f"AWS: {words}"


if __name__ == "__main__":
    main()
