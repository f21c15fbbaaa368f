"""Does the suite notice? Plant one defect at a time in a copy and see whether a test fails.

    python scripts/plant_defects.py [NAME ...] [--list] [--jobs N] [--all] [--no-check]

scripts/defects.toml holds the defects and, for each, the few tests that should catch it; --all runs every test that is
not slow in their place. The copy has the tracked files as they are in the working tree. The tests have to pass there
without a defect, or a failure would tell nothing; --no-check trusts that they do. Where modules have moved or lines
have changed, the script says which defect to write down anew. Ctrl+C leaves neither processes nor files behind.
Exit codes: 0 all caught, 1 one was not, 2 wrong usage or a table that no longer fits.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("defects.toml")


def fail(message):
    print(f"plant_defects: {message}", file=sys.stderr)
    sys.exit(2)


def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        fail(f"git cannot list the files of {ROOT}: {listed.stderr.strip()}")
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def planted(defect, files, root=ROOT):
    """Where a defect goes, and the text of that file with it; a ValueError if the table no longer fits."""
    name, old, nth = defect["name"], defect["old"], defect.get("nth")
    places = [file for file in files if Path(file).match(defect["file"])]
    if len(places) != 1:
        raise ValueError(f"{name}: {len(places)} files match {defect['file']}, not one")
    parts = (root / places[0]).read_text().split(old)
    if len(parts) != 2 and not (nth and nth < len(parts)):
        raise ValueError(f"{name}: {places[0]} has this text {len(parts) - 1} times, not once: {old!r}")
    if old == defect["new"]:
        raise ValueError(f"{name}: the new text is the old one")
    return places[0], old.join(parts[: nth or 1]) + defect["new"] + old.join(parts[nth or 1 :])


def kill_left_over(folder):
    """End what tests have left running: whatever has our own folder for its temporary files."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"TMPDIR={folder}\0" in (path / "environ").read_text(errors="replace"):
                os.kill(int(path.name), signal.SIGKILL)
        except OSError:  # it has ended, or is not ours
            pass


class Copy:
    """The repository in a folder of its own, and the tests in it."""

    def __init__(self, folder, files):
        self.root, self.temporary, self.process = folder / "copy", folder / "tmp", None
        self.temporary.mkdir(parents=True)
        for file in files:
            (self.root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, self.root / file, follow_symlinks=False)
        # without bytecode: an edit of the same size within a second would not be seen
        changes = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(self.temporary)}
        self.environment = os.environ | changes

    def run(self, *command):
        options = {"cwd": self.root, "env": self.environment, "text": True, "start_new_session": True}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen([sys.executable, *command], **options, **pipes)
        try:
            return self.process.communicate()[0], self.process.returncode
        finally:
            self.clear()

    def clear(self):
        """Nothing runs on, and nothing fills the disk."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        kill_left_over(self.temporary)
        for path in self.temporary.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def test(self, selection):
        """passed, or the first test that failed, or what kept the tests from running; and the seconds that it took."""
        start = time.perf_counter()
        path, words = selection
        options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *(["-k", words] if words else [])]
        output, code = self.run("-m", "pytest", path, *options)
        failed = re.search(r"(?m)^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output)
        if code == 1 and failed:
            result = failed[1] + " (timed out)" * ("TimeoutExpired" in output or "Timeout (>" in output)
        elif code == 0 and re.search(r"\b\d+ passed", output):
            result = "passed"
        else:
            last = "".join(output.strip().splitlines()[-1:])
            result = "no test ran: " + ("none is selected any more" if code == 5 else f"exit code {code}, {last}")
        return result, time.perf_counter() - start

    def plant(self, defect, selection, files):
        file, text = planted(defect, files, self.root)
        whole = (self.root / file).read_bytes()
        (self.root / file).write_text(text)
        try:
            return file, *self.test(selection)
        finally:
            (self.root / file).write_bytes(whole)


def read_table(names):
    defects = tomllib.loads(TABLE.read_text())["defect"]
    known = [defect["name"] for defect in defects]
    if len({*known}) < len(known):
        fail(f"{TABLE.name} has a name twice")
    if unknown := {*names} - {*known}:
        fail(f"{TABLE.name} has no {', '.join(sorted(unknown))}: see --list")
    return [defect for defect in defects if not names or defect["name"] in names]


def by_file(selections):
    """The selections of each file of tests, and one for all of them, to import and start what they share once."""
    groups = defaultdict(list)
    for path, words in dict.fromkeys(selections):
        groups[path].append(words)
    for path, group in groups.items():
        yield [(path, words) for words in group], (path, " or ".join(f"({words})" for words in group if words))


def run(defects, options, files, folder):
    """The number of defects that were not caught, printing a line on each."""
    copies, free = [Copy(folder / str(i), files) for i in range(options.jobs)], SimpleQueue()
    for copy in copies:
        free.put(copy)
    where, _ = copies[0].run("-c", "import cleanrl_utils; print(cleanrl_utils.__file__)")
    if Path(where.strip()).parent.parent.resolve() != copies[0].root.resolve():
        fail(f"not the copy is imported, but {where.strip()}")
    selections = {
        defect["name"]: ("tests", "") if options.all else (defect["tests"], defect["k"]) for defect in defects
    }

    def borrow(method, *arguments):
        copy = free.get()
        try:
            return getattr(copy, method)(*arguments)
        finally:
            free.put(copy)

    def check(group):
        """The selections of a group that do not pass without a defect, each with what failed."""
        members, together = group
        if borrow("test", together)[0] == "passed":
            return []
        results = [(selection, borrow("test", selection)[0]) for selection in members]
        return [(selection, result) for selection, result in results if result != "passed"]

    pool, bad = ThreadPoolExecutor(options.jobs), {}
    try:
        for found in pool.map(check, by_file(selections.values()) if options.check else ()):
            for selection, result in found:
                bad[selection] = result
                print(f"without a defect, {selection[0]} -k '{selection[1]}': {result}", flush=True)
        ready = [defect for defect in defects if selections[defect["name"]] not in bad]
        missed = len(defects) - len(ready)
        print(f"{'defect':36} {'file':42} {'seconds':>7}  caught by")
        for defect, (file, result, seconds) in zip(
            ready, pool.map(lambda d: borrow("plant", d, selections[d["name"]], files), ready)
        ):
            caught = result != "passed" and not result.startswith("no test ran")
            missed += not caught
            told = result if caught else f"NOT CAUGHT: {result}"
            print(f"{defect['name']:36} {file:42} {seconds:7.1f}  {told}", flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for copy in copies:
            copy.clear()
        pool.shutdown()
    print(f"{len(defects) - missed} of {len(defects)} caught")
    return missed


def main():
    style = {"description": __doc__, "formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = argparse.ArgumentParser(**style)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the defects to plant (default: all)")
    parser.add_argument("--list", action="store_true", help="print the defects and what should catch them")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="defects at a time, each in a copy of its own")
    parser.add_argument("--all", action="store_true", help="run all tests, not the few that should catch a defect")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="first without a defect")
    options = parser.parse_args()
    if options.jobs < 1:
        fail("--jobs must be at least 1")
    files, defects = tracked(), []
    table = read_table(options.names)
    for defect in table:
        try:
            file, _ = planted(defect, files)
            defects.append(defect)
            if options.list:
                print(f"{defect['name']:36} {file:42} {defect['tests']} -k '{defect['k']}'")
        except ValueError as error:
            print(f"{TABLE.name} no longer fits, write it anew: {error}", file=sys.stderr)
    stale = len(defects) < len(table)
    if options.list or not defects:
        sys.exit(2 if stale else 0)
    signal.signal(signal.SIGTERM, lambda *received: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="defects-", ignore_cleanup_errors=True) as folder:
            missed = run(defects, options, files, Path(folder))
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(1 if missed else 2 if stale else 0)


if __name__ == "__main__":
    main()
