"""A file imports nothing from the repository, and its PEP 723 header says what it needs; test_life.py runs it alone."""

import functools
import sys
from importlib.metadata import packages_distributions, version

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from helpers.files import FILES, ROOT, each, header, imports, require_for, script

OPTIONAL = {"wandb", "moviepy", "huggingface_hub"}  # of flags: the file says so when they are missing


@each()
def test_imports_nothing_from_the_repository(name):
    ours = {path.name for path in ROOT.iterdir() if path.is_dir()} | {path.stem for path in ROOT.glob("cleanrl*/*.py")}
    assert not imports(script(name).read_text()) & (ours | set(FILES) | {"."})


owners_of_modules = functools.cache(packages_distributions)


@each()
def test_header_covers_imports(name):
    source = script(name).read_text()
    block = header(source)
    assert block.keys() - {"tool"} == {"requires-python", "dependencies"}
    assert not block.get("tool", {}).get("uv", {}).keys() - {"override-dependencies"}  # of packages with old pins
    assert sys.version.split()[0] in SpecifierSet(block["requires-python"])
    requirements = {canonicalize_name(Requirement(line).name): Requirement(line) for line in block["dependencies"]}
    assert len(requirements) == len(block["dependencies"])

    require_for(name)
    owners = owners_of_modules() | {"PyQt5": ["PyQt5-Qt5"]}  # it has no Python code
    modules = imports(source) - set(sys.stdlib_module_names) - OPTIONAL
    if "torch.utils.tensorboard" in source:
        modules.add("tensorboard")  # torch's writer imports it
    for module in modules:
        names = {canonicalize_name(owner) for owner in owners[module]}
        assert names & requirements.keys(), f"{module} of {names} is not in the header"
    used = {canonicalize_name(owner) for module in modules for owner in owners[module]}
    assert requirements.keys() <= used, f"in the header, but not imported: {requirements.keys() - used}"
    for requirement in requirements.values():
        assert any(bound.operator == ">=" for bound in requirement.specifier), f"{requirement} has no lower bound"
        assert version(requirement.name) in requirement.specifier


def test_the_reader_of_headers_rejects_a_script_without_one():
    with pytest.raises(ValueError):
        header('"""No header."""\nimport numpy\n')


@each()
def test_a_file_evaluates_on_seeds_far_from_those_of_training(name):
    assert "args.seed + 2**30" in script(name).read_text().split("    # Save and close\n")[1]
