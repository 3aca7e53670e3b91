"""The Dockerfile and the scripts for machines with GPUs, rehearsed without Docker, Slurm or another machine."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))


# The image


def instructions(dockerfile: str) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments, lines that go on joined."""
    lines = [line for line in dockerfile.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    pairs = [line.split(None, 1) for line in "\n".join(lines).replace("\\\n", " ").splitlines()]
    return [(name, rest.strip()) for name, rest in pairs]


@pytest.fixture(scope="module")
def image() -> list[tuple[str, str]]:
    return instructions((ROOT / "Dockerfile").read_text())


def test_the_instructions_are_docker_s_in_its_order(image: list[tuple[str, str]]) -> None:
    names = [name for name, _ in image]
    assert names[0] == "FROM"
    assert set(names) <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT", "CMD"}
    assert names.count("ENTRYPOINT") == names.count("CMD") == 1
    for name, rest in image:
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(rest)), "the form without a shell"


def test_what_is_copied_is_there_and_all_that_the_package_needs(image: list[tuple[str, str]]) -> None:
    sources = [word for name, rest in image if name == "COPY" for word in rest.split()[:-1]]
    assert sorted(sources) == ["LICENSE", "README.md", "caddie", "pyproject.toml"]
    assert all((ROOT / source).exists() for source in sources)
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(kept) == sorted(sources), "the context holds what is copied"


def test_the_commands_are_shell_and_the_packages_those_of_the_project(image: list[tuple[str, str]]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(rest.split("=", 1) for name, rest in image if name == "ARG")
    installs = []
    for rest in (rest for name, rest in image if name == "RUN"):
        subprocess.run(["sh", "-n", "-c", rest], check=True)
        for part in rest.split("&&"):
            words = shlex.split(part)
            if words[0] == "pip":
                installs.append([word for word in words[2:] if not word.startswith("--")][-1])
    assert installs == [next(one for one in project["dependencies"] if one.startswith("torch")), ".[$EXTRAS]"]
    assert set(arguments["EXTRAS"].split(",")) <= set(project["optional-dependencies"])
    assert set(re.findall(r"\$(\w+)", "".join(rest for name, rest in image if name == "RUN"))) == set(arguments)
    (base,) = (rest for name, rest in image if name == "FROM")
    assert f"Programming Language :: Python :: {base.removeprefix('python:').split('-')[0]}" in project["classifiers"]
    assert json.loads(dict(image)["ENTRYPOINT"]) == list(project["scripts"])


# The scripts


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_sound(script: Path) -> None:
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", script], check=True)
    if (program := shutil.which("shellcheck")) is None:
        pytest.skip("no shellcheck")
    done = subprocess.run([program, script], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def program(folder: Path, name: str, text: str) -> None:
    """Put a stand-in for a program into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def run_script(name: str, folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script where stand-ins in the folder `bin` come first."""
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return subprocess.run(
        [ROOT / "scripts" / name, *arguments],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.long
@pytest.mark.parametrize(("nodes", "gpus"), [(1, 2), (2, 1)])
def test_slurm_runs_a_process_for_each_gpu_of_each_node(nodes: int, gpus: int, tiny_run: Any, tmp_path: Path) -> None:
    """Two processes on CPUs stand for the GPUs, and `srun` starts the tasks of all nodes here."""
    program(tmp_path / "bin", "scontrol", "[[ $* == 'show hostnames node[1-9]' ]] && echo 127.0.0.1 && echo another")
    program(
        tmp_path / "bin",
        "srun",
        'for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do SLURM_NODEID=$node "$@" & tasks+=($!); done\n'
        'for task in "${tasks[@]}"; do wait "$task" || exit 1; done',
    )
    slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NODELIST": "node[1-9]", "SLURM_JOB_NUM_NODES": str(nodes)}
    words = ("run", "tiny", *TINY, "train.micro_batches=2", "--data", str(tiny_run.text), "--out", "run")
    done = run_script("slurm.sh", tmp_path, *words, GPUS=str(gpus), VENV=sys.prefix, **slurm)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["world"], result["verified"]) == (2, True)


@pytest.mark.long
def test_a_rented_machine_is_set_up_trains_and_gives_its_run_back(tiny_run: Any, tmp_path: Path) -> None:
    """A folder is the machine: `ssh` runs its commands there. What is fetched lies in the checkout's place for it."""
    machine, out = tmp_path / "machine", f".tmp/rented-{os.getpid()}"
    program(tmp_path / "bin", "ssh", f'cd {machine} && exec bash -c "${{@: -1}}"')
    program(machine / "caddie-run" / ".venv" / "bin", "caddie", f'exec {sys.executable} -m caddie "$@"')
    words = ("run", "tiny", *TINY, "train.micro_batches=2", "--data", str(tiny_run.text), "--gpus", "2", "--out", out)
    try:
        for _ in range(2):  # the second finds the run done, and only fetches it
            done = run_script("rented.sh", tmp_path, "root@rented", *words)
            assert done.returncode == 0, done.stdout + done.stderr
            assert f"fetched {out}" in done.stdout
            result = json.loads((ROOT / out / "result.json").read_text())
            assert (result["world"], result["verified"]) == (2, True)
            assert (machine / "caddie-run" / "caddie" / "cli" / "run.py").exists(), "the program of this checkout"
    finally:
        shutil.rmtree(ROOT / out, ignore_errors=True)
    failed = run_script("rented.sh", tmp_path, "root@rented", "run", "tinny", "--out", f"{out}-no")
    assert failed.returncode != 0
    assert "did you mean tiny" in failed.stdout
    assert run_script("rented.sh", tmp_path, "root@rented", "run", "tiny").stderr.endswith("fetch with --out\n")
