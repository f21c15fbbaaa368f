"""A hub on the loopback: what huggingface_hub asks for when it creates repositories, commits to them and reads them."""

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "TestTokenThatIsOnlyForThisServer00"
LARGE = (".safetensors", ".mp4", ".npz", ".pth", ".pt")  # and events: stored beside git, by their SHA-256


def is_large(path):
    return path.endswith(LARGE) or "tfevents" in path


def object_id(path, data):
    if is_large(path) and data:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repository:
    """The files at each commit: a list of (commit, path -> bytes)."""

    def __init__(self, private=False):
        self.private, self.commits = private, []
        self.commit({".gitattributes": b"*.safetensors filter=lfs\n"})

    def commit(self, files):
        content = b"".join(path.encode() + data for path, data in sorted(files.items()))
        self.commits.append((hashlib.sha1(b"%d" % len(self.commits) + content).hexdigest(), files))

    def at(self, revision):
        if revision in ("main", None):
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body=b"", status=200, **headers):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def missing(self, code):
        self.answer({"error": "not found"}, 404, X_Error_Code=code)

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def handle_request(self):
        hub, body, path = self.server, self.body(), unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        if hub.failures and path != "/api/agent-harnesses":  # which the library asks for by the way
            return self.answer({"error": "out of order"}, hub.failures.pop(0))
        owner = hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        refused = {"X_Error_Message": "Invalid credentials in Authorization header"}
        if path == "/api/whoami-v2":
            return self.answer({"name": owner, "type": "user"}) if owner else self.answer({}, 401, **refused)
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or owner}/{asked['name']}"
            if owner is None or name.split("/")[0] != owner:
                return self.answer({"error": "no"}, 403 if owner else 401, **({} if owner else refused))
            found = name in hub.repositories
            hub.repositories.setdefault(name, Repository(asked.get("visibility") == "private" or asked.get("private")))
            return self.answer({"url": f"{hub.url}/{name}"}, 409 if found else 200)
        if stored := re.fullmatch("/stored/(.+)", path):
            assert hashlib.sha256(body).hexdigest() == stored[1]
            hub.stored[stored[1]] = body
            return self.answer()
        if found := re.fullmatch("/api/models/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/(.+))?", path):
            return self.repository(found[1], owner, found[2] or "revision", found[3], body)
        if found := re.fullmatch("/([^/]+/[^/]+)[.]git/info/lfs/objects/batch", path):
            return self.repository(found[1], owner, "batch", None, body)
        if found := re.fullmatch("/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.repository(found[1], owner, found[3], found[2], None)
        self.missing("Unknown")

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def repository(self, name, owner, action, revision, body):
        hub, repository = self.server, self.server.repositories.get(name)
        if repository is None or (repository.private and owner != name.split("/")[0]):
            return self.missing("RepoNotFound")
        at = repository.at(revision)
        if at is None:
            return self.missing("RevisionNotFound")
        commit, files = at
        if action == "revision":
            siblings = [{"rfilename": path} for path in sorted(files)]
            facts = {"id": name, "sha": commit, "private": bool(repository.private), "siblings": siblings}
            return self.answer(facts)
        if action == "tree":
            entries = []
            for path, data in files.items():
                entry = {"type": "file", "path": path, "size": len(data), "oid": object_id(path, data)}
                if is_large(path):
                    entry["lfs"] = {"oid": entry["oid"], "size": len(data), "pointerSize": 134}
                entries.append(entry)
            return self.answer(entries)
        if self.command in ("GET", "HEAD"):  # of a file
            if action not in files:
                return self.missing("EntryNotFound")
            data = files[action]
            return self.answer(data, ETag=f'"{object_id(action, data)}"', X_Repo_Commit=commit)
        if owner != name.split("/")[0]:
            return self.answer({"error": "no"}, 403 if owner else 401)
        if action == "preupload":
            modes = []
            for file in json.loads(body)["files"]:
                path = file["path"]
                known = {"oid": object_id(path, files[path])} if path in files else {}
                mode = "lfs" if is_large(path) else "regular"
                modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False} | known)
            return self.answer({"files": modes})
        if action == "batch":
            objects = []
            for one in json.loads(body)["objects"]:
                upload = {"upload": {"href": f"{hub.url}/stored/{one['oid']}"}}
                objects.append(one | ({} if one["oid"] in hub.stored else {"actions": upload}))
            return self.answer({"transfer": "basic", "objects": objects})
        files = dict(files)
        for line in body.splitlines():
            change = json.loads(line)
            value = change["value"]
            if change["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif change["key"] == "lfsFile":
                files[value["path"]] = hub.stored[value["oid"]]
            elif change["key"] == "deletedFile":
                del files[value["path"]]
        repository.commit(files)
        commit = repository.commits[-1][0]
        self.answer({"commitUrl": f"{hub.url}/{name}/commit/{commit}", "commitOid": commit})


@contextmanager
def serve():
    """A running hub: `repositories` by name, `requests` so far, `failures` (statuses of its next answers), `tokens`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.repositories, server.stored, server.requests, server.failures = {}, {}, [], []
    server.tokens = {TOKEN: "someone"}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
