"""One experiment out of a list in S3, brought to its end on machines that may be taken away at any time.

    python -m cleanrl_utils.s3_cells s3://BUCKET/PREFIX/matrix-KEY.json [INDEX] [--sync-every 60]

`python -m cleanrl_utils.submit_exp` writes the list and has AWS Batch start this command in a container, once per cell;
INDEX is $AWS_BATCH_JOB_ARRAY_INDEX there. No file system is shared: what has to outlive the machine is in S3.
- PREFIX/cells/ID/state.json says who runs the cell, how it stands, and which objects are its files. It is replaced only
  by who has read the version before (If-Match), after the files that it names are there: a worker that is killed leaves
  the last whole state, and of two workers one finds the state changed, and stops.
- The files go up when there is a new checkpoint, at most every --sync-every seconds, and at the end. In between the
  state is written all the same, with the end of the log: that is the heartbeat.
- SIGTERM, or the notice that a Spot machine is taken away: the run writes its checkpoint, which goes up, exit code 75.
- The next start, in an empty container, gets the files and goes on from the checkpoint: see cleanrl_utils/cells.py.

Exit codes: 0 done, also before; 75 interrupted, to be started again; 2 wrong usage; else that of the run; 1 also for a
cell that another worker has.
"""

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePosixPath

from cleanrl_utils import cells

RECORDS = Path("runs/.benchmark")
LEASE = 10  # heartbeats that may be missed before a cell counts as abandoned
CONFLICTS = ("PreconditionFailed", "ConditionalRequestConflict", "NoSuchKey")


class Lost(Exception):
    """Another worker has the cell."""


def split_url(url):
    """The bucket and the rest of s3://BUCKET/REST; ValueError for anything else."""
    scheme, _, path = url.partition("://")
    bucket, _, key = path.partition("/")
    if scheme != "s3" or not bucket or not key.strip("/"):
        raise ValueError(f"{url} is not of the form s3://BUCKET/PREFIX")
    return bucket, key.strip("/")


def connect(service, **options):
    """A client of boto3 that tries again for a while, or ImportError."""
    import boto3
    from botocore.config import Config

    retries = {"mode": "standard", "total_max_attempts": 5}
    return boto3.client(service, config=Config(retries=retries, connect_timeout=10, max_pool_connections=32), **options)


def errors():
    """What goes wrong in boto3, for `except`."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    return BotoCoreError, ClientError, Boto3Error


def read_state(s3, bucket, key):
    """The content of an object, its ETag and its age in seconds by the clock of S3; (None, None, 0) without one."""
    try:
        answer = s3.get_object(Bucket=bucket, Key=key)
    except s3.exceptions.NoSuchKey:
        return None, None, 0.0
    except s3.exceptions.ClientError:  # "access denied" for what is not there, where only the prefix may be listed
        listed = s3.list_objects_v2(Bucket=bucket, Prefix=key, MaxKeys=1).get("Contents", [])
        if [item["Key"] for item in listed] == [key]:
            raise
        return None, None, 0.0
    now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
    return json.loads(answer["Body"].read()), answer["ETag"], (now - answer["LastModified"]).total_seconds()


def read_matrix(s3, url):
    """The cells of a list, and the prefix that it is under."""
    bucket, key = split_url(url)
    matrix = read_state(s3, bucket, key)[0]
    if matrix is None:
        raise ValueError(f"there is no {url}")
    return matrix["cells"], str(PurePosixPath(key).parent)


def state_key(prefix, cell_id):
    return f"{prefix}/cells/{cell_id}/state.json"


def download(s3, bucket, files, out):
    """Get the files of a cell, path -> key, with `out` in place of runs/; a path that leads elsewhere is refused."""

    def get(item):
        path, key = PurePosixPath(item[0]), item[1]
        if path.parts[0] != "runs" or ".." in path.parts:
            raise ValueError(f"a state in s3://{bucket} names the file {path}, which is not in runs/")
        target = Path(out, *path.parts[1:])
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
        s3.download_file(bucket, key, str(temporary))
        os.replace(temporary, target)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(get, files.items()))


def identity(path):
    stat = os.stat(path)
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


def checkpoints(folder):
    """What the checkpoints of a run are now; another after each, as files are renamed into place."""
    return {path.name: identity(path) for path in folder.glob("checkpoint.*")} if folder else {}


def link(path, to):
    try:
        os.link(path, to)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(path, to)


def snapshot(record, run_dir, into):
    """Links to the files of a cell and its run at one moment, path -> (identity, link), and the checkpoints among them.

    What a checkpoint needs is in place before it and stays until the next one: links of one checkpoint fit together.
    Files that grow, such as events, are read from their beginning and may have more than the checkpoint knows of.
    """
    while True:
        shutil.rmtree(into, ignore_errors=True)
        into.mkdir()
        try:
            before, links = checkpoints(run_dir), {}
            for folder in filter(None, [record, run_dir]):
                for path in sorted(folder.rglob("*")):
                    if path.is_file() and path.suffix != ".tmp" and path.name != "lock":
                        links[path.as_posix()] = identity(path), into / str(len(links))
                        link(path, into / str(len(links) - 1))
            if checkpoints(run_dir) == before:
                return links, before
        except FileNotFoundError:  # removed since it was listed
            pass


def log_end(record):
    """The last lines of a cell's log."""
    try:
        text = (record / "log.txt").read_bytes()[-20_000:].decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.replace("\r", "\n").splitlines()[-12:])[-4000:]


def name_of(owner):
    return f"{owner['job'] or owner['token']} on {owner['host']}"


class Claim:
    """A cell in S3 and the right to change it, which is lost when somebody else does."""

    def __init__(self, s3, bucket, folder, record, lease):
        self.s3, self.bucket, self.folder, self.record, self.lease = s3, bucket, folder, record, lease
        job, attempt = os.environ.get("AWS_BATCH_JOB_ID", ""), int(os.environ.get("AWS_BATCH_JOB_ATTEMPT") or 1)
        self.owner = {"token": secrets.token_hex(4), "job": job, "attempt": attempt, "host": os.uname().nodename}
        self.state, self.etag = None, None
        self.sent, self.stamp = {}, None  # path -> (identity, key) of what is there; the checkpoints among it
        self.objects = set()  # the keys of files that exist

    def put(self, **changes):
        """Replace the state that was read or written last, or raise Lost."""
        from botocore.exceptions import ClientError

        state = self.state | changes | {"owner": self.owner, "version": self.state["version"] + 1, "lease": self.lease}
        while True:
            unchanged = {"IfMatch": self.etag} if self.etag else {"IfNoneMatch": "*"}
            place = {"Bucket": self.bucket, "Key": f"{self.folder}/state.json", "ContentType": "application/json"}
            try:
                self.etag = self.s3.put_object(**place, **unchanged, Body=json.dumps(state, indent=1))["ETag"]
                break
            except ClientError as error:
                if error.response["Error"]["Code"] not in CONFLICTS:
                    raise
            found, etag, _ = read_state(self.s3, self.bucket, place["Key"])
            if found and (found["owner"], found["version"]) == (state["owner"], state["version"]):
                self.etag = etag  # our own write, of which the answer was lost
                break
            if (found or {}).get("version", 0) != self.state["version"]:
                raise Lost(f"taken over by {name_of(found['owner']) if found else 'nobody, but removed'}")
        self.state = state

    def take(self):
        """Become the worker of a cell; False if it is done. Lost if another worker is alive, which is waited for."""
        seen = None
        while True:
            state, self.etag, age = read_state(self.s3, self.bucket, f"{self.folder}/state.json")
            if state and state["state"] == "done":
                return False
            if state and state["state"] == "running" and age < state["lease"] and not self.follows(state["owner"]):
                if seen not in (None, state["version"]):
                    raise Lost(f"it is being run by {name_of(state['owner'])}")
                if seen is None:
                    print(f"{name_of(state['owner'])} had it: {state['lease']:.0f} s for a sign of life", flush=True)
                seen = state["version"]
                time.sleep(min(5.0, state["lease"] / 10))
                continue
            self.state = state or {"version": 0, "files": {}, "starts": 0}
            try:
                self.put(state="running", code=None, starts=self.state["starts"] + 1)
                return True
            except Lost:  # by a moment: look again
                continue

    def follows(self, owner):
        """Whether an owner is an earlier attempt of this very job: Batch begins the next one when it has ended."""
        return bool(owner["job"]) and owner["job"] == self.owner["job"] and owner["attempt"] < self.owner["attempt"]

    def fetch(self):
        """Get the files of the cell, and remove what earlier workers could not finish to send."""
        files = self.state["files"]
        download(self.s3, self.bucket, files, "runs")
        self.sent = {path: (identity(path), key) for path, key in files.items()}
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.folder}/")
        found = {item["Key"] for page in pages for item in page.get("Contents", [])}
        self.objects = found - {f"{self.folder}/state.json"}
        self.put()  # still ours, so nothing that was listed is from a worker after us
        self.tidy()

    def tidy(self):
        """Remove the objects that are no part of the state that was read or written last."""
        for key in sorted(self.objects - {key for _, key in self.sent.values()}):
            self.s3.delete_object(Bucket=self.bucket, Key=key)
            self.objects.discard(key)

    def sync(self, final=False, **changes):
        """Write the state, after the files if there is a new checkpoint or this is the last time."""
        run_dir = (cells.read_json(self.record / "begun.json") or {}).get("run_dir")
        run_dir = Path(run_dir) if run_dir and Path(run_dir).is_dir() else None
        changes["log"] = log_end(self.record)
        if not final and checkpoints(run_dir) == (self.stamp or {}):
            self.put(**changes)
            return
        with tempfile.TemporaryDirectory(prefix=".snapshot-", dir="runs") as into:
            links, stamp = snapshot(self.record, run_dir, Path(into, "links"))
            changed = [path for path, (mark, _) in links.items() if self.sent.get(path, [None])[0] != mark]
            keys = {path: self.sent[path][1] for path in links.keys() - set(changed)}
            for path in changed:
                keys[path] = f"{self.folder}/{self.owner['token']}-{self.state['version'] + 1}/{path}"
                self.objects.add(keys[path])
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda path: self.s3.upload_file(str(links[path][1]), self.bucket, keys[path]), changed))
        try:
            self.put(files=keys, **changes)
        except Lost:  # what was sent for this state is of no use; all else is the other worker's now
            self.tidy()
            raise
        self.sent, self.stamp = {path: (mark, keys[path]) for path, (mark, _) in links.items()}, stamp
        self.tidy()


def spot_notice():
    """Whether this machine is about to be taken away; None where there is no metadata service to ask."""
    url = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    call = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
    seconds = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    try:
        asked = urllib.request.Request(f"{url}/latest/api/token", method="PUT", headers=seconds)
        token = {"X-aws-ec2-metadata-token": call(asked, timeout=1).read().decode()}
        asked = urllib.request.Request(f"{url}/latest/meta-data/spot/instance-action", headers=token)
        return bool(call(asked, timeout=1).read())
    except urllib.error.HTTPError as error:
        return False if error.code == 404 else None
    except OSError:
        return None


def listen(over):
    """Stop the run when the machine is about to be taken away; not in `watch`, as sending files may take minutes."""
    answered = False
    while not over.wait(5):
        notice = spot_notice()
        if notice:
            print("This machine is about to be taken away: stopping", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
        if notice or (notice is None and not answered):  # a service that has answered before is asked again
            return
        answered = True


def watch(claim, over, sync_every):
    """While the run goes on: show its log, send its files, and stop it if another worker has taken the cell."""
    log, synced = claim.record / "log.txt", time.monotonic()
    shown = log.stat().st_size if log.exists() else 0
    while True:
        ended = over.wait(min(1.0, sync_every))
        if log.exists():
            with log.open("rb") as file:
                file.seek(shown)
                new = file.read()
            shown += len(new)
            print(new.decode(errors="replace"), end="", flush=True)
        if ended:
            return
        if time.monotonic() - synced >= sync_every:
            try:
                claim.sync()
            except Lost as error:
                print(f"s3_cells: {error}: stopping", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGTERM)
                return
            except Exception as error:  # whatever it is, the run goes on
                print(f"s3_cells: not in S3 yet, next time maybe: {error}", file=sys.stderr, flush=True)
            synced = time.monotonic()


def interrupt(*received):
    sys.exit(cells.INTERRUPTED)


def run(claim, cell, sync_every):
    """Run a cell that is ours, from the files that are in S3; the exit code, or None if it did not come to that."""
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=[claim, over, sync_every])
    try:
        claim.fetch()
        watcher.start()
        if "AWS_BATCH_JOB_ID" in os.environ:
            threading.Thread(target=listen, args=[over], daemon=True).start()
        return cells.run_cell(cell, claim.record)
    except SystemExit:
        return None
    finally:
        over.set()
        if watcher.ident:
            watcher.join()


def work(s3, url, index, sync_every):
    """Run a cell unless it is done, and return the exit code."""
    matrix, prefix = read_matrix(s3, url)
    cell, bucket = matrix[index], split_url(url)[0]
    RECORDS.mkdir(parents=True, exist_ok=True)
    claim = Claim(s3, bucket, f"{prefix}/cells/{cell['id']}", RECORDS / cell["id"], LEASE * sync_every)
    if not claim.take():
        print(f"Done before: {cell['id']}")
        return 0
    try:
        code = run(claim, cell, sync_every)
        if code is None:  # the files may not all be here: those in S3 stay
            claim.put(state="interrupted", code=cells.INTERRUPTED)
            return cells.INTERRUPTED
        code = cells.INTERRUPTED if code > 128 else code  # killed, by whatever it was: to be tried again
        begun = cells.read_json(claim.record / "begun.json") or {}
        state = {0: "done", cells.INTERRUPTED: "interrupted"}.get(code, "failed")
        claim.sync(final=True, state=state, code=code, seconds=begun.get("seconds", 0.0))
    except errors() as error:  # S3 was away for long: the next start goes on from what is there
        print(f"s3_cells: {error}", file=sys.stderr)
        return cells.INTERRUPTED
    script = cells.script_of(cell["command"])[1]
    if code == 2 and cell["script_sha"] and cells.text_of(script) != cell["script_sha"]:
        print(f"s3_cells: the image has another {script} than the list: build and push it anew", file=sys.stderr)
    print(f"{state}: s3://{bucket}/{claim.folder}", flush=True)
    return code


def main():
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_utils.s3_cells",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="the list: s3://BUCKET/PREFIX/matrix-KEY.json")
    parser.add_argument("index", type=int, nargs="?", help="the cell (default: $AWS_BATCH_JOB_ARRAY_INDEX or 0)")
    parser.add_argument("--sync-every", type=float, default=60, metavar="S", help="seconds (default: 60)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, interrupt)  # until there is a run that can be told to stop
    index = options.index if options.index is not None else int(os.environ.get("AWS_BATCH_JOB_ARRAY_INDEX") or 0)
    try:
        known = errors()
    except ImportError:
        print('s3_cells: S3 needs boto3: pip install -e ".[cloud]" or pip install boto3', file=sys.stderr)
        sys.exit(2)
    try:
        code = work(connect("s3"), options.url, index, max(0.1, options.sync_every))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is in S3: the exit code should say so
        sys.exit(code)
    except Lost as error:
        message, code = f"nothing more is done here: {error}", 1
    except (ValueError, IndexError) as error:
        message, code = f"{options.url}, cell {index}: {error}", 2
    except (OSError, *known) as error:
        message, code = f"{options.url}: {error}", 1
    print(f"s3_cells: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
