"""`evenload env`, and launchers that carry some variables to other machines and drop the rest."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from evenload.api import load_recipe
from evenload.commands.env import STARTUP, ray_runtime_env, variables, variables_as
from evenload.core.errors import EvenloadError
from evenload.core.recipe.carried import CHECK, VARIABLE, carried
from evenload.core.recipe.recipe import shipped
from evenload.core.recipe.rules import refuse_in_loops
from evenload.integrations.unmodified.roll_call import _how_to_carry
from harness.cases import full

RECIPE = load_recipe("deepspeed")
ASK = """
import deepspeed, os
from evenload.patches import session
own = session._session
print("rank", os.environ["RANK"], own.recipe.plugins.packing.max_tokens if own else "without", flush=True)
"""
PDSH = """#!/bin/sh
# pdsh -S -f N -w HOSTS COMMAND...: on every host, with what a login there has, which is none of the caller's variables.
hosts=$5; shift 5; number=0
for host in $(echo "$hosts" | tr , ' '); do
    words=$(echo "$*" | sed "s/%n/$number/g")
    env -i HOME=$HOME PATH=$PATH GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1 sh -c "$words" & number=$((number + 1))
done
wait
"""


def content_of(text):
    """What a process on another machine has of it, read by the startup file itself."""
    code = "import runpy, sys; own = runpy.run_path(sys.argv[1]); import json; print(json.dumps(own['content']))"
    environment = {**os.environ, VARIABLE: text}
    words = [sys.executable, "-S", "-c", code, str(STARTUP / "sitecustomize.py")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    content = json.loads(done.stdout)
    return content


def recipes_of_loops():
    chosen = []
    for path in shipped().values():
        try:
            recipe = load_recipe(path)
            refuse_in_loops(recipe)
            chosen.append(recipe)
        except EvenloadError:
            continue
    return chosen


def test_every_recipe_arrives_as_it_was():
    from evenload.core.recipe.carried import recipe_in

    recipes = recipes_of_loops()
    assert len(recipes) > 5
    for recipe in recipes:
        content = content_of(carried(recipe))
        assert recipe_in(content).model_dump() == recipe.model_dump()
        assert content["before"]


def test_a_setting_without_effect_in_loops_is_refused():
    recipe = load_recipe("pipeline", ["plugins.pipeline.v_shape=true"])
    with pytest.raises(EvenloadError, match="two stages on each device are laid out by `evenload train` alone"):
        variables(recipe)


def test_no_shell_takes_its_letters_for_its_own():
    for text in map(carried, recipes_of_loops()):
        assert shlex.quote(text.replace("=", "")) == text.replace("=", "")
        assert len(text) < 4000


def test_every_form_says_the_same():
    own = variables(RECIPE)
    assert json.loads(variables_as(RECIPE, "json")) == own
    assert {row["name"]: row["value"] for row in yaml.safe_load(variables_as(RECIPE, "k8s"))} == own
    for_ray = own | {"PYTHONPATH": f"{STARTUP}:${{PYTHONPATH}}"}
    assert yaml.safe_load(variables_as(RECIPE, "ray")) == {"env_vars": for_ray}
    lines = dict(line.split("=", 1) for line in variables_as(RECIPE, "dotenv").splitlines())
    assert lines[VARIABLE] == own[VARIABLE]
    assert lines["PYTHONPATH"].split(os.pathsep)[0] == str(STARTUP)
    ask = f'{variables_as(RECIPE, "shell")}\necho "$PYTHONPATH"; echo "${VARIABLE}"'
    done = subprocess.run(["sh", "-c", ask], env={"PYTHONPATH": "/mine"}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [f"{STARTUP}:/mine", own[VARIABLE]]
    with pytest.raises(EvenloadError, match="--export knows no such form"):
        variables_as(RECIPE, "fish")


@pytest.mark.parametrize("present", [None, "", "/own/lib", "/own/lib:/more"])
def test_lines_of_an_environment_file_keep_what_is_on_the_path(present, monkeypatch):
    """They take the place of the variable, as no other form does."""
    if present is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", present)
    lines = dict(line.split("=", 1) for line in variables_as(RECIPE, "dotenv").splitlines())
    assert lines["PYTHONPATH"] == (f"{STARTUP}:{present}" if present else str(STARTUP))


def test_a_variable_that_was_damaged_on_the_way_is_named_and_switches_nothing_on():
    environment = {**os.environ, "PYTHONPATH": str(STARTUP), VARIABLE: carried(RECIPE)[:-20]}
    words = [sys.executable, "-c", "print('goes on')"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr.count("is not what evenload has written")) == ("goes on\n", 1)


@pytest.mark.parametrize(
    ("variable", "word"),
    [
        ("OMPI_COMM_WORLD_RANK", "-x PYTHONPATH"),
        ("PMI_RANK", "-genvlist PYTHONPATH"),
        ("SLURM_PROCID", "--export=ALL"),
        ("RAY_JOB_ID", "--export ray"),
        ("RANK", "`evenload env` prints"),
    ],
)
def test_what_a_launcher_drops_is_mended_in_its_own_words(variable, word):
    assert word in _how_to_carry({variable: "0"})


def test_a_script_under_run_gives_ray_s_workers_its_variables_beside_their_own(monkeypatch):
    monkeypatch.setenv(VARIABLE, "x")
    monkeypatch.setenv("EVENLOAD_STARTED", "runs/started")
    monkeypatch.delenv(CHECK, raising=False)
    carried_on = {VARIABLE: "x", "EVENLOAD_STARTED": "runs/started"}
    assert ray_runtime_env(None) == {"env_vars": carried_on | {"PYTHONPATH": f"{STARTUP}:${{PYTHONPATH}}"}}
    own = {"pip": ["mine"], "env_vars": {"PYTHONPATH": "/mine", "A": "1"}}
    wanted = {"pip": ["mine"], "env_vars": {"A": "1", "PYTHONPATH": f"{STARTUP}:/mine"} | carried_on}
    assert ray_runtime_env(own) == wanted
    assert own == {"pip": ["mine"], "env_vars": {"PYTHONPATH": "/mine", "A": "1"}}


@full
@pytest.mark.slow
def test_deepspeeds_launcher_switches_it_on_on_all_hosts(tmp_path):
    for name, text in {"pdsh": PDSH, "ssh": "#!/bin/sh\necho 127.0.0.1\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "ask.py").write_text(ASK)
    (tmp_path / "hosts").write_text("one slots=1\ntwo slots=1\n")
    (tmp_path / "recipe.yaml").write_text("trainer: deepspeed\nplugins: {packing: {enabled: true, max_tokens: 161}}\n")
    launcher = shutil.which("deepspeed", path=str(Path(sys.executable).parent))
    assert launcher
    addresses = ["--master_addr", "127.0.0.1", "--master_port", "29513"]
    command = [launcher, "--hostfile", "hosts", "--include", "one:0@two:0", *addresses, "ask.py"]
    words = [sys.executable, "-m", "evenload", "run", "recipe.yaml", "--", *command]
    environment = {**os.environ, "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    assert said == ["rank 0 161", "rank 1 161"], done.stderr[-3000:]
