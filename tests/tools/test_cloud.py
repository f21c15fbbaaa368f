"""The set-up for the cloud: the lock, the image, built and run for real with podman, and the infrastructure.

The image is built from cloud/Dockerfile on a Debian that mmdebstrap makes, since no registry is needed then, with the
part of the lock that the core needs; torch, which takes a minute to install, is lent by this Python. Nothing stays.
"""

import ast
import functools
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from helpers.files import ROOT, posix, require, require_program, smoke
from helpers.processes import run, run_dir

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MARKERS = {"python_version": "3.11", "python_full_version": "3.11.9", "sys_platform": "linux", "os_name": "posix"}
MARKERS |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython", "extra": ""}
MARKERS |= {"platform_python_implementation": "CPython", "platform_release": "", "platform_version": ""}


# The lock


def read_lock(name):
    """name of a package -> (version, its lines)."""
    text = (ROOT / "requirements" / name).read_text()
    entries = re.findall(r"(?m)^[a-z].+\n(?:^ .+\n)+", text)
    assert text == text.splitlines(keepends=True)[0] + "".join(entries)
    return {entry.split("==")[0]: (re.match(r"[^=]+==(\S+)", entry)[1], entry) for entry in entries}


def locked(variant):
    both, own = read_lock("lock.txt"), read_lock(f"lock-{variant}.txt")
    assert not both.keys() & own.keys()
    return both | own


def missing(requirements, lock, extras=("",)):
    """Those requirements that count in the image and that the lock does not meet."""
    requirements = [Requirement(text) for text in requirements]
    for requirement in requirements:
        if requirement.marker and not any(requirement.marker.evaluate(MARKERS | {"extra": extra}) for extra in extras):
            continue
        name = canonicalize_name(requirement.name)
        if name not in lock or not requirement.specifier.contains(lock[name][0], prereleases=True):
            yield f"{requirement}, the lock has {lock.get(name, ['nothing'])[0]}"


@functools.cache
def lock_extras():
    (line,) = re.findall(r"(?m)^EXTRAS = (.+)$", (ROOT / "scripts/lock.py").read_text())
    return ast.literal_eval(line)


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_lock_meets_pyproject(variant):
    lock = locked(variant)
    asked = [*PROJECT["dependencies"], *(r for extra in lock_extras() for r in PROJECT["optional-dependencies"][extra])]
    assert not list(missing(asked, lock))
    assert list(missing(["torch>=99", "nothing-of-the-kind"], lock)), "the check itself"


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_lock_is_complete(variant):
    """What a locked package asks for is in the lock, too; read from those that are installed here in that version."""
    lock, seen = locked(variant), 0
    asked = {}  # package -> the extras with which it is asked for
    for text in [*PROJECT["dependencies"], *sum(map(PROJECT["optional-dependencies"].get, lock_extras()), [])]:
        asked.setdefault(canonicalize_name(Requirement(text).name), {""}).update(Requirement(text).extras)
    for name, (version, _) in lock.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.version == version:
            seen += 1
            assert not list(missing(distribution.requires or [], lock, asked.get(name, [""]))), name
    if seen < 20:
        pytest.skip(f"only {seen} packages are here in the version of the lock")


@pytest.mark.parametrize("name", ["lock.txt", "lock-cpu.txt", "lock-cuda.txt"])
def test_lock_pins_by_hash_and_names_no_server(name):
    entries = read_lock(name)
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry) for _, entry in entries.values())
    assert "://" not in "".join(entry for _, entry in entries.values())
    cuda = [package for package in entries if re.match("nvidia|cuda|triton|jax-cuda", package)]
    assert bool(cuda) == (name == "lock-cuda.txt")


def test_lock_has_one_torch():
    (cpu, _), (cuda, _) = read_lock("lock-cpu.txt")["torch"], read_lock("lock-cuda.txt")["torch"]
    assert cpu == f"{cuda}+cpu"


# The image


def instructions():
    """(instruction, rest) of cloud/Dockerfile, with continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "cloud/Dockerfile").read_text()).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def test_dockerfile():
    lines = instructions()
    last_stage = lines[max(i for i, (word, _) in enumerate(lines) if word == "FROM") :]
    assert dict(last_stage)["USER"] == "1000:1000", "not root, and as a number"
    assert ast.literal_eval(dict(last_stage)["ENTRYPOINT"]) == ["tini", "--"], "it runs its arguments"
    # what changes often comes after what is large
    order = [rest.split()[-2] for word, rest in last_stage if word == "COPY"]
    assert order[:2] == ["/opt/venv", "cleanrl"] and "pip" not in str(last_stage[3:])
    installs = [rest for word, rest in lines if "pip " in rest and " install " in rest]
    assert installs and all("--require-hashes" in rest and "--no-deps" in rest for rest in installs)
    assert not [word for word, _ in lines if word in ("HEALTHCHECK", "ADD", "VOLUME", "EXPOSE")]
    secrets = re.compile(r"(?i)\b(\w*_?(key|token|secret|password))\b")
    assert not [rest for word, rest in lines if word in ("ARG", "ENV", "COPY") and secrets.search(rest)]
    # no image and no file comes from a named server
    images = [rest for word, rest in lines if word == "FROM"]
    assert all(image.startswith("${BASE}") for image in images)
    assert dict(line for line in lines if "BASE=" in line[1])["ARG"] == "BASE=python:3.11-slim-bookworm"
    assert "://" not in str(lines)
    version = re.search(r'(?m)^PYTHON = "(.+)"', (ROOT / "scripts/lock.py").read_text())[1]
    assert f"python:{version}-" in str(lines), "the lock is for the Python of the image"


def test_what_the_dockerfile_copies_reaches_it():
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    sources = [w for word, rest in instructions() if word == "COPY" and "--from" not in rest for w in rest.split()[:-1]]
    for source in sources:
        assert any(Path(source.replace("${VARIANT}", "cpu")).match(pattern) for pattern in allowed), source
        assert (ROOT / source.replace("${VARIANT}", "cpu")).exists()
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*", "the rest does not"


def core_lock():
    """The lines of the lock that the core of pyproject.toml needs but for torch, found by what uv wrote as `via`."""
    lock, wanted = read_lock("lock.txt"), {canonicalize_name(Requirement(r).name) for r in PROJECT["dependencies"]}
    wanted.remove("torch")
    wanted |= {name for name in ("pygame", "pygame-ce") if name in lock}  # gymnasium[classic-control]
    lock = {name: entry for name, entry in lock.items() if name not in ("mujoco", "imageio")}  # gymnasium[mujoco]
    via = {name: set(re.findall(r"(?m)^    #(?: via|  ) +([\w-]+)", entry)) for name, (_, entry) in lock.items()}
    while more := {name for name in lock if via[name] & wanted} - wanted:
        wanted |= more
    return "".join(entry for name, (_, entry) in lock.items() if name in wanted)


def pip_settings(folder):
    """Options with which a build installs as pip does here: its settings, and the local folders that they name."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    settings = {}
    for line in lines:  # as global.cert='/etc/x' or :env:.cert='/etc/x'; the environment comes first
        key, value = line.split("=", 1)
        settings.setdefault(key.split(".")[-1], ast.literal_eval(value))
    settings.pop("user", None), settings.pop("target", None), settings.pop("require-virtualenv", None)
    file = folder / "pip.conf"
    file.write_text("[global]\n" + "".join(f"{key} = {' '.join(value.split())}\n" for key, value in settings.items()))
    volumes = [f"{file}:/etc/pip.conf:ro"]
    words = [word.removeprefix("file://") for value in settings.values() for word in value.split()]
    folders = {path.parent if path.is_file() or path.name == "simple" else path for path in map(Path, words)}
    folders = {path for path in folders if path.is_absolute() and path.exists() and path != Path("/")}
    return [
        word for volume in [*volumes, *(f"{path}:{path}:ro" for path in sorted(folders))] for word in ("-v", volume)
    ]


@pytest.fixture(scope="module")
def podman():
    """A function that runs podman with storage of its own; what it made is removed at the end."""
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the image has Python 3.11, and another one cannot lend it torch")
    for program in ("podman", "mmdebstrap"):
        require_program(program)
    require("torch")
    if os.geteuid() != 0:
        why = (
            "only root can mount what a build needs: be root, or leave this out: make test ARGS='-k \"not container\"'"
        )
        pytest.fail(why) if os.environ.get("CLEANRL_REQUIRE_ALL") == "1" else pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="podman"))  # podman takes no runroot of more than 50 characters
    settings = folder / "containers.conf"
    # limits that need no privilege, the network of the machine, and no service of the system
    settings.write_text(
        '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\nnetns = "host"\n'
        'log_driver = "k8s-file"\n[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
    )
    command = ["podman", "--root", str(folder / "root"), "--runroot", str(folder / "run")]

    def call(*words, code=0, timeout=600):
        env = os.environ | {"CONTAINERS_CONF": str(settings), "TMPDIR": str(folder)}
        pipes = {"capture_output": True, "text": True, "timeout": timeout}
        done = subprocess.run([*command, *map(str, words)], env=env, check=False, cwd=folder, **pipes)
        assert done.returncode == code, (
            f"{words}: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
        return done.stdout.strip()

    call.folder = folder
    yield call
    for words in (["rm", "--all", "--force", "--time", "0"], ["rmi", "--all", "--force"]):
        subprocess.run([*command, *words], env=os.environ | {"CONTAINERS_CONF": str(settings)}, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def image(podman):
    """The CPU image of cloud/Dockerfile, with the core only."""
    root, context = podman.folder / "base.tar", podman.folder / "context"
    packages = "python3,python3-venv,python3-pip,ca-certificates,tini"
    make = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm", str(root)]
    subprocess.run(make, check=True, capture_output=True, timeout=300)
    podman("import", "--quiet", root, "base")
    root.unlink()
    files = [*(ROOT / line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!")]
    for path in (match for file in files for match in ROOT.glob(str(file.relative_to(ROOT)))):
        target = context / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
    shutil.copy(ROOT / ".dockerignore", context)
    (context / "requirements/lock.txt").write_text(core_lock())
    (context / "requirements/lock-cpu.txt").write_text("")
    options = ["--build-arg", "BASE=base", "--build-arg", "VARIANT=cpu", "--build-arg", "REVISION=0123abc"]
    options += ["--isolation", "chroot", "--network", "host", "--layers=false", *pip_settings(podman.folder)]
    podman("build", *options, "-f", ROOT / "cloud/Dockerfile", "-t", "cleanrl", context)
    return "cleanrl"


@pytest.mark.slow
def test_a_container_is_stopped_and_another_finishes(podman, image):
    """SIGTERM reaches the run: exit code 75 and a checkpoint in the volume, from which a second container goes on.

    No setting of the machine that built the image is in it. One test, since two might build it twice.
    """
    seen = podman("run", "--rm", image, "sh", "-c", "cat /etc/pip.conf; ls -A /requirements /root /tmp; env", code=0)
    assert "find-links" not in seen and "index" not in seen and "PIP" not in seen
    assert "tini" in podman("image", "inspect", "--format", "{{.Config.Entrypoint}}", image)
    runs = podman.folder / "runs"
    runs.mkdir()
    runs.chmod(0o777)
    volume = ["-e", "OMP_NUM_THREADS=1", "-v", f"{runs}:/cleanrl/runs"]
    (podman.folder / "lent.pth").write_text("/lent\n")  # torch, behind what the image has itself
    volume += ["-v", f"{Path(find_spec('torch').origin).parents[1]}:/lent:ro"]
    volume += ["-v", f"{podman.folder}/lent.pth:/opt/venv/lib/python3.11/site-packages/lent.pth:ro"]
    seen = podman("run", "--rm", image, "sh", "-c", "id -u; touch cleanrl/ppo.py || echo read-only")
    assert seen.split() == ["1000", "read-only"]
    command = ["python", "cleanrl/ppo.py", "--no-cuda", "--total-timesteps", "16000", "--num-envs", "1"]
    podman("run", "-d", "--name", "first", *volume, image, *command)
    deadline = time.monotonic() + 120
    while "step" not in podman("logs", "first"):
        assert time.monotonic() < deadline, podman("logs", "first")
        time.sleep(0.2)
    podman("kill", "--signal", "TERM", "first")
    assert podman("wait", "first") == "75"
    (folder,) = runs.iterdir()
    assert (folder / "checkpoint.pt").stat().st_uid == 1000
    assert (folder / "commit.txt").read_text() == "0123abc\n"
    log = podman("run", "--rm", *volume, image, "python", "cleanrl/ppo.py", "--resume", f"runs/{folder.name}")
    assert "16000" in log


def copied(folder):
    """What the last stage of cloud/Dockerfile copies from the repository, in a folder."""
    for word, rest in instructions():
        for source in rest.split()[:-1] if word == "COPY" and "--from" not in rest and "lock" not in rest else ():
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, folder / source)
    return folder


def test_what_the_image_holds_is_enough(tmp_path):
    """Without an image: a run, the worker of AWS Batch and the benchmark need nothing else of the repository."""
    require("torch")
    folder = copied(tmp_path)
    run(folder / "cleanrl/ppo.py", *smoke("ppo"), cwd=folder)
    assert run_dir(folder).name.startswith("CartPole-v1__ppo__1__")
    tools = [folder / "cleanrl_utils/benchmark.py", *folder.glob("cleanrl_utils/**/s3_*.py")]
    assert len(tools) > 1
    for tool in tools:
        name = ".".join(tool.relative_to(folder).with_suffix("").parts)
        command = [sys.executable, "-c", f"import {name} as tool; print(tool.__file__)"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(tool)


@posix
def test_the_answer_of_git_in_the_image(tmp_path):
    """The line of cloud/Dockerfile that answers `git rev-parse HEAD`, run by a shell, in another folder."""
    (line,) = [rest for word, rest in instructions() if word == "RUN" and "REVISION" in rest]
    command = line.replace("/usr/local/bin", str(tmp_path))
    subprocess.run(["sh", "-c", command], env=os.environ | {"REVISION": "0123abc"}, check=True)
    git = str(tmp_path / "git")
    assert subprocess.run([git, "rev-parse", "HEAD"], capture_output=True, text=True).stdout == "0123abc\n"
    assert subprocess.run([git, "status"], capture_output=True, text=True).returncode
    (tmp_path / "git").unlink()
    subprocess.run(["sh", "-c", command], env=os.environ | {"REVISION": ""}, check=True)
    assert not (tmp_path / "git").exists()


# The infrastructure


TERRAFORM = ROOT / "cloud/terraform"


def plain(value):
    """What python-hcl2 parsed, without the quotes that it keeps around names and strings."""
    if isinstance(value, dict):
        return {
            key.strip('"'): plain(item) for key, item in value.items() if key not in ("__comments__", "__is_block__")
        }
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value[1:-1] if isinstance(value, str) and value[:1] == value[-1:] == '"' and len(value) > 1 else value


@functools.cache
def parsed():
    require("hcl2")
    import hcl2

    return [plain(hcl2.loads(path.read_text())) for path in sorted(TERRAFORM.glob("*.tf"))]


@functools.cache
def blocks(kind):
    """(type, name) or name of each block of a kind, such as resource -> its content."""
    found = {}
    for file in parsed():
        for block in file.get(kind, []):
            for name, content in block.items():
                nested = kind in ("resource", "data")
                found |= {(name, inner): body for inner, body in content.items()} if nested else {name: content}
    return found


def statements():
    """Every statement of a policy, with the name of its document."""
    for (kind, name), document in blocks("data").items():
        if kind == "aws_iam_policy_document":
            dynamic = [item["statement"]["content"] for item in document.get("dynamic", [])]
            for statement in sum(dynamic, document.get("statement", [])):
                yield name, statement


def test_terraform_is_formatted():
    if shutil.which("terraform") is None:
        pytest.skip("there is no terraform here, and no package of Debian has it")
    done = subprocess.run(["terraform", "fmt", "-check", "-diff"], cwd=TERRAFORM, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_terraform_names_only_what_is_there():
    """What `terraform validate` would say of names; it needs the provider, which has to be downloaded."""
    text = "\n".join(re.sub(r"(?m)#.*$", "", path.read_text()) for path in TERRAFORM.glob("*.tf"))
    variables = set(blocks("variable"))
    assert set(re.findall(r"\bvar\.(\w+)", text)) == variables, "declared and used"
    used_resources = {match for match in re.findall(r"(?<![\w.\"])(aws_\w+)\.(\w+)", text)}
    assert used_resources <= set(blocks("resource")), used_resources - set(blocks("resource"))
    used_data = set(re.findall(r"\bdata\.(aws_\w+)\.(\w+)", text))
    assert used_data == set(blocks("data"))
    local = {
        name for body in re.findall(r"(?ms)^locals \{\n(.+?)^\}", text) for name in re.findall(r"(?m)^  (\w+) +=", body)
    }
    assert set(re.findall(r"\blocal\.(\w+)", text)) == local
    for name, variable in blocks("variable").items():
        assert variable["description"] and variable["type"] and variable["validation"], name
    assert all(output["description"] and "value" in output for output in blocks("output").values())
    (versions,) = re.findall(r'source  = "hashicorp/aws"\n +version = "(.+)"', text)
    assert versions.startswith("~> ")


META = "for_each count depends_on lifecycle provider"
ARGUMENTS = {  # of version 6 of the provider, by its documentation: those of a block, of the blocks in it, ...
    "aws_batch_compute_environment": {
        "": f"{META} name name_prefix region service_role state tags type unmanagedv_cpus",
        "compute_resources": "allocation_strategy bid_percentage desired_vcpus ec2_key_pair image_id instance_role "
        "instance_type max_vcpus min_vcpus placement_group security_group_ids spot_iam_fleet_role subnets tags type",
        "ec2_configuration": "image_id_override image_kubernetes_version image_type",
        "launch_template": "launch_template_id launch_template_name version",
        "update_policy": "job_execution_timeout_minutes terminate_jobs_on_update",
        "lifecycle": "create_before_destroy ignore_changes prevent_destroy",
    },
    "aws_batch_job_queue": {
        "": f"{META} name priority region scheduling_policy_arn state tags",
        "compute_environment_order": "compute_environment order",
        "job_state_time_limit_action": "action max_time_seconds reason state",
    },
    "aws_batch_job_definition": {
        "": f"{META} container_properties deregister_on_new_revision ecs_properties name node_properties parameters "
        "platform_capabilities propagate_tags region scheduling_priority tags type",
        "retry_strategy": "attempts",
        "evaluate_on_exit": "action on_exit_code on_reason on_status_reason",
        "timeout": "attempt_duration_seconds",
    },
}


def arguments(body, inside=""):
    """(block, argument) of a resource; of a block in it, which the parser has as a list of dictionaries, too."""
    for name, value in body.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            for item in value:
                yield from arguments(item, name)
        else:
            yield inside, name


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_terraform_arguments_of_batch(kind):
    """Their names have changed with version 6 of the provider: compute_environment_name is name since."""
    known = {(block, name) for block, names in ARGUMENTS[kind].items() for name in names.split()}
    used = {pair for (which, _), body in blocks("resource").items() if which == kind for pair in arguments(body)}
    assert used and used <= known, used - known


VALUES = {"region": "us-east-1", "bucket": "my-runs", "image_tag": "0123abc"}
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:wandb-AbCdEf"


def test_terraform_refuses_bad_values(tmp_path):
    """Terraform itself reads the variables; without a resource it needs no provider."""
    if shutil.which("terraform") is None:
        pytest.skip("there is no terraform here, and no package of Debian has it")
    shutil.copy(TERRAFORM / "variables.tf", tmp_path)
    shutil.copy(TERRAFORM / "terraform.tfvars.example", tmp_path / "terraform.tfvars")

    def plan(**values):
        words = [f"-var={name}={value}" for name, value in values.items()]
        command = ["terraform", "plan", "-input=false", "-no-color", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    done = plan()
    assert done.returncode == 0, done.stdout + done.stderr
    assert plan(secrets=f'{{WANDB_API_KEY="{SECRET}"}}', vpc_id="vpc-1", subnet_ids='["subnet-1"]').returncode == 0
    bad = {"bucket": "My_Runs", "image_tag": "latest", "vpc_id": "vpc-1", "secrets": '{WANDB_API_KEY="a-secret"}'}
    done = plan(**bad, budget='{limit=0,email="me@example.org"}', job="{attempts=11}", log_days="2", max_vcpus="1.5")
    assert done.returncode == 1
    for name in [*bad, "budget", "job", "log_days", "max_vcpus"]:
        assert f'variable "{"subnet_ids" if name == "vpc_id" else name}"' in done.stderr, (name, done.stderr)


def test_nothing_runs_when_nothing_is_asked():
    environment = blocks("resource")["aws_batch_compute_environment", "main"]
    (resources,) = environment["compute_resources"]
    assert resources["min_vcpus"] == resources["desired_vcpus"] == 0
    assert "max_vcpus" in resources["max_vcpus"]
    types = blocks("variable")["instance_types"]["default"]
    assert all(re.fullmatch(r"\w+\.[24]?x?large", name) for name in types), "AWS Batch may exceed it by one of these"
    kinds = {kind for kind, _ in blocks("resource")}
    assert not kinds & {"aws_nat_gateway", "aws_eip", "aws_instance", "aws_kms_key", "aws_lb"}, "these cost by the hour"
    assert all(
        body["vpc_endpoint_type"] == "Gateway"
        for (kind, _), body in blocks("resource").items()
        if kind == "aws_vpc_endpoint"
    )


def test_queues_and_definitions_have_their_names():
    text = (TERRAFORM / "batch.tf").read_text()
    assert re.findall(r'"([\w-]+)" +=? *\{ type = "(\w+)"', text.replace("= {", "{")) == [
        ("on-demand", "EC2"),
        ("spot", "SPOT"),
        ("on-demand-gpu", "EC2"),
        ("spot-gpu", "SPOT"),
    ]
    assert blocks("resource")["aws_batch_job_queue", "main"]["name"] == "${var.name}-${each.key}"
    assert blocks("resource")["aws_batch_job_definition", "main"]["name"] == "${var.name}-${each.key}"
    assert re.findall(r"(?m)^      (\w+) = \{\n +image ", text) == ["cpu", "gpu"]
    assert blocks("variable")["name"]["default"] == "cleanrl"
    assert {"bucket", "job_queues", "job_definitions", "repository_url", "workdir"} <= blocks("output").keys()


def test_jobs_are_retried_as_our_tools_ask(monkeypatch):
    """A definition on its own retries what a submission by our tools does."""
    from types import SimpleNamespace

    from cleanrl_utils.engines import aws_batch

    monkeypatch.chdir(ROOT)
    options = SimpleNamespace(aws_workdir="/mnt/x", aws_job_queue="q", aws_job_definition="d", retries=9)
    wanted = aws_batch.request_for(ROOT / "runs/matrix-x.json", 1, options)["retryStrategy"]["evaluateOnExit"]
    definition = blocks("resource")["aws_batch_job_definition", "main"]
    (strategy,) = definition["retry_strategy"]
    names = {"action": "action", "on_exit_code": "onExitCode", "on_status_reason": "onStatusReason"}
    names["on_reason"] = "onReason"
    assert [{names[key]: value for key, value in rule.items()} for rule in strategy["evaluate_on_exit"]] == wanted
    properties = definition["container_properties"]
    assert 'user = "1000:1000"' in properties and "privileged = false" in properties
    assert "valueFrom = arn" in properties and "environment" not in properties
    assert definition["timeout"]


def test_bucket_and_images_are_shut():
    resources = blocks("resource")
    access = resources["aws_s3_bucket_public_access_block", "runs"]
    assert [access[name] for name in access if name != "bucket"] == [True] * 4
    (rule,) = resources["aws_s3_bucket_server_side_encryption_configuration", "runs"]["rule"]
    assert rule["apply_server_side_encryption_by_default"] == [{"sse_algorithm": "AES256"}]
    assert resources["aws_s3_bucket", "runs"]["force_destroy"] is False
    assert resources["aws_s3_bucket_lifecycle_configuration", "runs"]["rule"]
    (deny,) = [statement for name, statement in statements() if name == "bucket"]
    assert deny["effect"] == "Deny" and deny["condition"][0]["variable"] == "aws:SecureTransport"
    repository = resources["aws_ecr_repository", "images"]
    assert repository["image_tag_mutability"] == "IMMUTABLE"
    assert repository["image_scanning_configuration"] == [{"scan_on_push": True}]
    assert resources["aws_cloudwatch_log_group", "jobs"]["retention_in_days"]
    template = resources["aws_launch_template", "machine"]
    assert template["metadata_options"][0]["http_tokens"] == "required"
    assert template["block_device_mappings"][0]["ebs"][0]["encrypted"] is True


def test_nothing_comes_in():
    kinds = [kind for kind, _ in blocks("resource")]
    assert "aws_vpc_security_group_ingress_rule" not in kinds and "aws_security_group_rule" not in kinds
    groups = [body for (kind, _), body in blocks("resource").items() if kind.endswith("security_group")]
    assert len(groups) == 2 and not any("ingress" in body or "egress" in body for body in groups)
    out = [body for (kind, _), body in blocks("resource").items() if kind == "aws_vpc_security_group_egress_rule"]
    assert sorted(body["from_port"] for body in out) == sorted(body["to_port"] for body in out) == [443, 2049]


NO_RESOURCE = re.compile(r"ecr:GetAuthorizationToken|batch:(Describe|List)\w+|ec2:Describe\w+|pricing:GetProducts")


def test_roles_may_do_what_they_need_and_no_more():
    allowed = [(name, statement) for name, statement in statements() if statement.get("effect", "Allow") == "Allow"]
    assert len(allowed) >= 10
    for name, statement in allowed:
        assert not [action for action in statement["actions"] if "*" in action], (name, statement)
        if statement.get("resources") == ["*"]:
            assert all(NO_RESOURCE.fullmatch(action) for action in statement["actions"]), (name, statement)
        assert "not_actions" not in statement and "not_resources" not in statement
        for principal in statement.get("principals", []):
            assert principal["type"] == "Service"
    (runs,) = [statement for name, statement in allowed if statement.get("sid") == "Runs"]
    assert runs["resources"] == ["${local.objects}"]
    (listing,) = [statement for name, statement in allowed if statement.get("sid") == "ListRuns"]
    assert listing["condition"][0]["test"] == "StringLike", "no listing of the rest of the bucket"
    attached = [
        body["policy_arn"] for (kind, _), body in blocks("resource").items() if kind.endswith("policy_attachment")
    ]
    assert [arn.split("/")[-1] for arn in attached] == ["AmazonEC2ContainerServiceforEC2Role"]


def test_no_key_in_clear():
    secrets = re.compile(
        r"(AKIA|ASIA)[A-Z0-9]{16}|hf_[A-Za-z0-9]{20,}|gh[pousr]_\w{20,}|-----BEGIN|"
        r"(?i:secret_?access_?key|api_?key|token|password)\"? *[=:] *\"(?!arn:|\$\{)[^\"]{8,}\"|\b[0-9a-f]{40}\b"
    )
    assert secrets.search('WANDB_API_KEY = "0123456789"') and secrets.search("AKIA" + "A" * 16), "the check itself"
    for path in [path for path in (ROOT / "cloud").rglob("*") if path.is_file()]:
        assert not secrets.search(path.read_text()), path


def test_checkov():
    """All of its policies; each exception is in the code with its reason."""
    own = os.pathsep.join(str(Path(sys.prefix, "checkov", folder)) for folder in ("bin", "Scripts"))
    checkov = shutil.which("checkov") or shutil.which("checkov", path=own)
    if checkov is None:
        message = "not installed: checkov (`make test` installs it)"
        pytest.fail(message) if os.environ.get("CLEANRL_REQUIRE_ALL") == "1" else pytest.skip(message)
    command = [checkov, "--directory", str(ROOT / "cloud"), "--skip-download", "--quiet", "--compact"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(re.findall("Failed checks: 0", done.stdout)) == 2, done.stdout


def test_ray_cluster_is_within_the_schema():
    """`ray up` reads cloud/ray.yaml; Ray's own check of it needs no cloud."""
    require("ray", "yaml", "jsonschema")
    code = "import sys, yaml; from ray.autoscaler._private.util import fillout_defaults, validate_config\n"
    code += "text = sys.stdin.read()\n"
    code += "for source in text, text + 'surprise: 1\\n':\n"
    code += "    validate_config(fillout_defaults(yaml.safe_load(source)))\n    print('within', flush=True)"
    text = (ROOT / "cloud/ray.yaml").read_text()
    done = subprocess.run([sys.executable, "-c", code], input=text, text=True, capture_output=True, check=False)
    assert done.stdout.split() == ["within"], done.stderr[-2000:]
    assert done.returncode and "surprise" in done.stderr, done.stderr[-2000:]
