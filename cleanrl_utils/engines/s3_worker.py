"""One experiment out of a list in S3, brought to its end on machines that may be taken away at any time.

    python -m cleanrl_utils.engines.s3_worker s3://BUCKET/PREFIX/matrix-KEY.json [INDEX] [--sync-every 60] [--lease 600]

`python -m cleanrl_utils.submit_exp` writes the list and has AWS Batch start this command in a container, once per cell;
INDEX is $AWS_BATCH_JOB_ARRAY_INDEX there. No file system is shared: what has to outlive the machine is in S3.
- PREFIX/cells/ID/state.json says who runs the cell, how it stands, and which objects are its files. It is replaced only
  by who has read the version before (If-Match), after the files that it names are there: a worker that is killed leaves
  the last whole state, and of two workers one finds the state changed, and stops.
- The files go up when there is a new checkpoint, at most every --sync-every seconds, and at the end. Meanwhile the
  state is written ten times in --lease seconds, with the end of the log: that is the heartbeat.
- SIGTERM, Ctrl+C, or the notice that a Spot machine is taken away: the run writes its checkpoint, which goes up, exit
  code 75.
- The next start, in an empty container, gets the files and goes on from the checkpoint: see cells.py.
  In a folder that has been used, what is there of the cell is moved to runs/.replaced first.

Exit codes: 0 done, also before; 75 interrupted, to be started again; 2 wrong usage; else that of the run; 1 also for a
cell that another worker has.
"""

import argparse
import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path, PurePosixPath

from cleanrl_utils.engines import cells

RECORDS = Path("runs/.benchmark")


class Lost(Exception):
    """Another worker has the cell; `files`: the objects that are its files now."""

    files = ()


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
    return check_names(matrix["cells"], url), str(PurePosixPath(key).parent)


def check_names(matrix, url):
    """The cells, the names of which become folders; ValueError if one leads elsewhere."""
    if strange := [cell["id"] for cell in matrix if not re.fullmatch(r"[\w+-][\w.+-]*", cell["id"])]:
        raise ValueError(f"a list in {url} names the cell {strange[0]!r}")
    return matrix


def state_key(prefix, cell_id):
    return f"{prefix}/cells/{cell_id}/state.json"


def check_paths(files):
    """ValueError if the path of a file leads elsewhere."""
    for path in map(PurePosixPath, files):
        if path.parts[:1] != ("runs",) or len(path.parts) < 3 or ".." in path.parts:
            raise ValueError(f"a state names the file {path}, which is not in a folder of runs/")


def download(s3, bucket, files, place):
    """Get the files of a cell, path -> key, to place(path)."""
    check_paths(files)

    def get(item):
        key, target = item[1], place(item[0])
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(4)}.tmp")
        try:
            s3.download_file(bucket, key, str(temporary))
        except errors() as error:
            raise OSError(f"s3://{bucket}/{key}: {error}") from error
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
        self.owner = {"token": secrets.token_hex(8), "job": job, "attempt": attempt, "host": os.uname().nodename}
        self.state, self.etag = {}, None  # as read or written last
        self.lock, self.begun, self.earlier = threading.Lock(), time.monotonic(), 0.0
        self.sent, self.stamp = {}, {}  # path -> (identity, key) of what is there; the checkpoints among it
        self.objects = set()  # what is there, too, and may be of no use any more

    def put(self, **changes):
        """Replace the state, if it is ours or the one that was read, or raise Lost. Afterwards it is what is in S3.

        Each try has an id of its own: one that S3 has done, but of which the answer was lost, is recognised as ours,
        and one that arrives late finds another state than the one that it was meant for.
        """
        place = {"Bucket": self.bucket, "Key": f"{self.folder}/state.json"}
        with self.lock:
            for pause in (0.2, 1, 5, None):
                seconds = round(self.earlier + time.monotonic() - self.begun, 1)
                state = self.state | changes | {"owner": self.owner, "lease": self.lease, "seconds": seconds}
                state["id"] = secrets.token_hex(8)
                unchanged = {"IfMatch": self.etag} if self.etag else {"IfNoneMatch": "*"}
                body = {"Body": json.dumps(state, indent=1), "ContentType": "application/json"}
                try:
                    self.state, self.etag = state, self.s3.put_object(**place, **unchanged, **body)["ETag"]
                    return
                except errors() as error:
                    problem = error
                found, etag, _ = read_state(self.s3, self.bucket, place["Key"])
                there = found or {}
                if there.get("id") != self.state.get("id") and there.get("owner") != self.owner:
                    lost = Lost(f"taken over by {name_of(found['owner']) if found else 'nobody, but removed'}")
                    lost.files = there.get("files", {}).values()
                    raise lost
                self.state, self.etag = found or self.state, etag
                if there.get("id") == state["id"]:
                    return
                if pause:
                    time.sleep(pause)
            raise problem

    def take(self):
        """Become the worker of a cell; False if it is done. Lost if another worker is alive, which is waited for."""
        seen = None
        while True:
            state, self.etag, age = read_state(self.s3, self.bucket, f"{self.folder}/state.json")
            if state and state["state"] == "done":
                return False
            if state and state["state"] == "running" and age < state["lease"] and not self.follows(state["owner"]):
                if seen not in (None, state["id"]):
                    raise Lost(f"it is being run by {name_of(state['owner'])}")
                if seen is None:
                    print(f"{name_of(state['owner'])} had it: {state['lease']:.0f} s for a sign of life", flush=True)
                seen = state["id"]
                time.sleep(min(5.0, state["lease"] / 10))
                continue
            self.state = state or {"files": {}, "starts": 0}
            self.earlier = self.state.get("seconds", 0.0)
            try:
                self.put(state="running", code=None, starts=self.state["starts"] + 1)
                return True
            except Lost:  # by a moment: look again
                continue

    def follows(self, owner):
        """Whether an owner is an earlier attempt of this very job: Batch begins the next one when it has ended."""
        return bool(owner["job"]) and owner["job"] == self.owner["job"] and owner["attempt"] < self.owner["attempt"]

    def run_dir(self):
        """The folder of the run, or None."""
        path = Path((cells.read_json(self.record / "begun.json") or {}).get("run_dir") or "none")
        return path if path.parts[:-1] == ("runs",) and path.is_dir() else None

    def clear(self):
        """Move away what is here of the cell from an earlier start: it may be older or newer than what is in S3."""
        check_paths(self.state["files"])
        named = {Path(*Path(path).parts[:2]) for path in self.state["files"] if not path.startswith(RECORDS.as_posix())}
        old = [path for path in {self.record, self.run_dir(), *named} if path and path.exists()]
        if self.record in old:
            cells.lock(self.record).close()  # an earlier run may still be writing
        for path in old:
            to = Path("runs", ".replaced", secrets.token_hex(4))
            to.mkdir(parents=True)
            path.rename(to / path.name)
            print(f"{path} was here before: it is in {to} now", flush=True)

    def fetch(self):
        """Get the files of the cell, and remove what earlier workers could not finish to send."""
        self.clear()
        files = self.state["files"]
        download(self.s3, self.bucket, files, Path)
        self.sent = {path: (identity(path), key) for path, key in files.items()}
        self.stamp = checkpoints(self.run_dir())
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=f"{self.folder}/")
        found = {item["Key"] for page in pages for item in page.get("Contents", [])}
        self.put()  # still ours, so nothing that was listed is from a worker after us
        self.objects = found - {f"{self.folder}/state.json"}
        self.tidy(files.values())

    def tidy(self, named):
        """Remove objects that the state does not name, which has to be the one in S3: no later one will name them."""
        for key in sorted(self.objects - set(named)):
            self.s3.delete_object(Bucket=self.bucket, Key=key)
            self.objects.discard(key)

    def sync(self, **changes):
        """Send the files that have changed, to new places, and then the state that names them."""
        folder, into = f"{self.folder}/{secrets.token_hex(8)}", self.record.with_name(f"{self.record.name}.snapshot")
        try:
            links, stamp = snapshot(self.record, self.run_dir(), into)
            changed = [path for path, (mark, _) in links.items() if self.sent.get(path, [None])[0] != mark]
            keys = {path: f"{folder}/{path}" if path in changed else self.sent[path][1] for path in links}
            self.objects |= set(keys.values())
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda path: self.s3.upload_file(str(links[path][1]), self.bucket, keys[path]), changed))
        finally:
            shutil.rmtree(into, ignore_errors=True)
        try:
            self.put(files=keys, log=log_end(self.record), **changes)
        except Lost as lost:
            self.tidy(lost.files)
            raise
        self.sent, self.stamp = {path: (mark, keys[path]) for path, (mark, _) in links.items()}, stamp
        self.tidy(keys.values())


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
    failures = 0
    while failures < 10 and not over.wait(5):
        notice = spot_notice()
        failures = failures + 1 if notice is None else 0
        if notice:
            print("This machine is about to be taken away: stopping", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            return


def send(write, **changes):
    """Write to S3 while the run goes on, which stops if the cell is lost; no other trouble is one of the run."""
    try:
        write(**changes)
    except Lost as error:
        print(f"s3_worker: {error}: stopping", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
    except Exception as error:
        print(f"s3_worker: not in S3 yet, next time maybe: {error}", file=sys.stderr, flush=True)


def beat(claim, ended):
    """Say that the worker is alive, also while files come and go."""
    while not ended.wait(claim.lease / 10):
        send(claim.put, log=log_end(claim.record))


def watch(claim, over, sync_every):
    """While the run goes on: show its log, and send its files when there is a new checkpoint."""
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
            if checkpoints(claim.run_dir()) != claim.stamp:
                send(claim.sync)
            synced = time.monotonic()


def interrupt(*received):
    sys.exit(cells.INTERRUPTED)


def run(claim, cell, sync_every):
    """Run a cell that is ours, from the files that are in S3; the exit code, or None if it did not come to that."""
    over = threading.Event()
    watcher = threading.Thread(target=watch, args=[claim, over, sync_every])
    try:
        claim.fetch()
        begun_with = claim.stamp
        watcher.start()
        if "AWS_BATCH_JOB_ID" in os.environ:
            threading.Thread(target=listen, args=[over], daemon=True).start()
        code = cells.run_cell(cell, claim.record)
        if code <= 128:
            return code
        progress = checkpoints(claim.run_dir()) != begun_with
        what = "to be tried again" if progress else "without a new checkpoint: not to be tried again"
        print(f"s3_worker: the run was killed by signal {code - 128}, {what}", file=sys.stderr, flush=True)
        return cells.INTERRUPTED if progress else 1
    except SystemExit as end:
        if end.code == cells.INTERRUPTED:
            return None
        print(end.code, file=sys.stderr)
        return 2
    finally:
        over.set()
        if watcher.ident:
            watcher.join()


def work(s3, url, index, sync_every, lease):
    """Run a cell unless it is done, and return the exit code."""
    matrix, prefix = read_matrix(s3, url)
    cell, bucket, ended = matrix[index], split_url(url)[0], threading.Event()
    RECORDS.mkdir(parents=True, exist_ok=True)
    claim = Claim(s3, bucket, f"{prefix}/cells/{cell['id']}", RECORDS / cell["id"], lease)
    try:
        if not claim.take():
            print(f"Done before: {cell['id']}")
            return 0
        threading.Thread(target=beat, args=[claim, ended], daemon=True).start()
        code = run(claim, cell, sync_every)
        if code is None:  # the files may not all be here: those in S3 stay
            claim.put(state="interrupted", code=cells.INTERRUPTED)
            return cells.INTERRUPTED
        state = {0: "done", cells.INTERRUPTED: "interrupted"}.get(code, "failed")
        claim.put()  # or nothing has to be sent
        claim.sync(state=state, code=code)
    except (OSError, *errors()) as error:  # the next start goes on from what is there
        print(f"s3_worker: {error}", file=sys.stderr)
        with contextlib.suppress(*errors()):
            if claim.state.get("owner") == claim.owner:
                claim.put(state="interrupted", code=cells.INTERRUPTED)
        return cells.INTERRUPTED
    finally:
        ended.set()
    script = cells.script_of(cell["command"])[1]
    if code == 2 and cell["script_sha"] and cells.text_of(script) != cell["script_sha"]:
        print(f"s3_worker: the image has another {script} than the list: build and push it anew", file=sys.stderr)
    print(f"{state}: s3://{bucket}/{claim.folder}", flush=True)
    return code


def main():
    signal.signal(signal.SIGTERM, interrupt)  # until there is a run that can be told to stop
    signal.signal(signal.SIGINT, lambda *received: os.kill(os.getpid(), signal.SIGTERM))
    parser = argparse.ArgumentParser(
        prog="python -m cleanrl_utils.engines.s3_worker",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", help="the list: s3://BUCKET/PREFIX/matrix-KEY.json")
    parser.add_argument("index", type=int, nargs="?", help="the cell (default: $AWS_BATCH_JOB_ARRAY_INDEX or 0)")
    parser.add_argument("--sync-every", type=float, default=60, metavar="S", help="seconds (default: 60)")
    parser.add_argument("--lease", type=float, default=600, metavar="S", help="without a heartbeat (default: 600)")
    options = parser.parse_args()
    index = options.index if options.index is not None else int(os.environ.get("AWS_BATCH_JOB_ARRAY_INDEX") or 0)
    try:
        known = errors()
    except ImportError:
        print('s3_worker: S3 needs boto3: pip install -e ".[cloud]" or pip install boto3', file=sys.stderr)
        sys.exit(2)
    try:
        code = work(connect("s3"), options.url, index, max(0.1, options.sync_every), options.lease)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # all is in S3: the exit code should say so
        sys.exit(code)
    except Lost as error:
        message, code = f"nothing more is done here: {error}", 1
    except (ValueError, IndexError) as error:
        message, code = f"{options.url}, cell {index}: {error}", 2
    except (OSError, *known) as error:
        message, code = f"{options.url}: {error}", 1
    print(f"s3_worker: {message}", file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
