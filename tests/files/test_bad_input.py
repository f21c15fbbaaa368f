"""Bad input gets one clear line, exit code 2 and no folder; a non-finite loss ends a run and spares its checkpoint."""

import re
import shutil

from helpers.files import (
    FILES,
    LINEAGE,
    ROOT,
    continuous_control,
    default,
    defines,
    each,
    each_text,
    family,
    load,
    require_for,
    script,
    smoke,
    step_sizes,
    uses,
)
from helpers.processes import RUN, run
from helpers.refusals import assert_stops_on_non_finite_loss, hiding, refuse, refuse_all

BAD_SIZES = {
    "ppo": {
        "num_minibatches": (3, "--num-minibatches"),
        "total_timesteps": (10, "--total-timesteps"),
        "num_envs": (0, "--num-envs"),
        "n_parallel": (0, "--n-parallel"),
        "num_steps": (0, "--num-steps"),
        "update_epochs": (0, "--update-epochs"),
        "checkpoint_freq": (0, "--checkpoint-freq"),
        "num_iterations_obs_norm_init": (0, "--num-iterations-obs-norm-init"),
        "update_proportion": (0, "--update-proportion"),
        "num_levels": (-1, "--num-levels"),
        "start_level": (3, "--start-level"),
        "trxl_num_layers": (0, "--trxl-num-layers"),
        "trxl_num_heads": (0, "--trxl-num-heads"),
        "trxl_memory_length": (0, "--trxl-memory-length"),
        "trxl_dim": (30, "--trxl-dim must be even, and a multiple of --trxl-num-heads 4"),
        "anneal_steps": (0, "--anneal-steps"),
    },
    "dqn": {
        "num_envs": (0, "--num-envs"),
        "batch_size": (0, "--batch-size"),
        "buffer_size": (0, "--buffer-size"),
        "train_frequency": (0, "--train-frequency"),
        "target_network_frequency": (0, "--target-network-frequency"),
        "total_timesteps": (0, "--total-timesteps"),
        "checkpoint_freq": (0, "--checkpoint-freq"),
    },
}
BAD_SIZES["c51"] = {"n_atoms": (1, "--n-atoms"), "v_min": (100, "--v-min"), **BAD_SIZES["dqn"]}
BAD_SIZES["apex"] = {"num_actors": (0, "--num-actors"), "buffer_size": (799, "--buffer-size")}
BAD_SIZES["rainbow"] = {"n_step": (0, "--n-step"), "buffer_size": (0, "--buffer-size")}
BAD_SIZES["ddpg"] = {
    "buffer_size": (0, "--buffer-size"),
    "policy_frequency": (0, "--policy-frequency"),
    "num_envs": (0, "--num-envs"),
    "batch_size": (0, "--batch-size"),
    "total_timesteps": (0, "--total-timesteps"),
    "checkpoint_freq": (0, "--checkpoint-freq"),
}
BAD_SIZES["td3"] = BAD_SIZES["ddpg"]
BAD_SIZES["sac"] = {"target_network_frequency": (0, "--target-network-frequency"), "utd": (0, "--utd")}
BAD_SIZES["sac"] |= BAD_SIZES["ddpg"]
BAD_SIZES["sac"] |= {"q_hidden": (0, "--q-hidden")}  # of CrossQ
BAD_SIZES["sac"] |= {"dropout_rate": (1, "--dropout-rate")}  # of DroQ, and then of TQC
BAD_SIZES["sac"] |= {"n_critics": (0, "--n-critics"), "n_quantiles": (2, "--n-quantiles")}
BAD_SIZES["sac"] |= {"top_quantiles_to_drop_per_net": (-1, "--top-quantiles-to-drop-per-net")}
BAD_SIZES["pqn"] = BAD_SIZES["ppo"]
BAD_SIZES["ppg"] = {"n_iteration": (0, "--n-iteration"), "num_aux_rollouts": (3, "--num-aux-rollouts")}
BAD_SIZES["ppg"] |= {"v_value": (2, "--v-value"), "total_timesteps": (199, "--total-timesteps")}
BAD_SIZES["qdagger"] = {"teacher_steps": (0, "--teacher-steps"), "temperature": (0, "--temperature")}


def wrong_spaces(name):
    """Environments whose spaces a file does not handle, and the kind of probes of the file that it names instead."""
    if uses(name, "godot_rl"):  # its games have none of these ids
        return {}
    wrong = {
        "discrete": {"probe_envs:ConstantRewardContinuous-v0": "continuous", "probe_envs:ImageDiscrete-v0": None},
        "continuous": {"probe_envs:ConstantRewardDiscrete-v0": "discrete", "probe_envs:ImageContinuous-v0": None},
        None: {"CartPole-v1": "discrete"},
    }[LINEAGE[name].get("probes")]
    if uses(name, "gymnax"):  # whose environments these are
        wrong = {"Pendulum-v1": "continuous", "Breakout-MinAtar": None}
    if continuous_control(name):  # PPO's actions have no bounds
        wrong["probe_envs:UnboundedContinuous-v0"] = "continuous"
    return wrong


def unknown_environments(name):
    """Command lines with an environment that does not exist, and what the line that refuses them has to name."""
    if uses(name, "godot_rl"):  # a game is named by its path: test_godot.py
        return {}
    known, version = re.fullmatch("(.*?)([-_]v.*|)", default(name, "env_id")).groups()
    return {f"{known[:-1]}{version}": rf"\b{known}({version})?\b", "no_such_module:Env-v0": "no_such_module"}


@each()
def test_bad_sizes_wrong_spaces_and_unknown_environments(name, tmp_path):
    bad = {flag: pair for flag, pair in BAD_SIZES[family(name)].items() if f"    {flag}: " in script(name).read_text()}
    if defines(name, "    num_envs: int = 0 "):  # it means: as many as --local-num-envs in each process
        bad["num_envs"] = (-1, "--num-envs")
    spaces, unknown = wrong_spaces(name), unknown_environments(name)
    assert bad
    cases = [smoke(name, **{flag: value}) for flag, (value, _) in bad.items()]
    cases += [["--env-id", env_id] for env_id in [*spaces, *unknown]]
    cases.append(["--seed", 2**30])
    lines = refuse_all(name, cases, tmp_path)
    assert "--seed must be" in lines.pop()
    for named in reversed(unknown.values()):
        assert re.search(named, lines.pop())
    for line, (_, named) in zip(lines, bad.values()):
        assert named in line
    for line, kind in zip(lines[len(bad) :], spaces.values(), strict=True):
        files = re.findall(r"\b(\w+)\.py\b", line.removeprefix(f"{name}.py: "))
        assert files and name not in files
        for file in files:
            assert (ROOT / "cleanrl" / f"{file}.py").exists(), line
        assert LINEAGE[files[0]].get("probes") == kind
        assert not (continuous_control(name) and continuous_control(files[0])), "it has the same bounds"


@each_text("FrameReplay", which=lambda name: "counted in 32 bits" in script(name).read_text())
def test_more_frames_than_32_bits_count(name, tmp_path):
    assert "--total-timesteps" in refuse(name, *smoke(name, total_timesteps=2**31), cwd=tmp_path)


@each_text("unknown")
def test_names_of_games_and_names_that_are_nearly_right(name, tmp_path):
    near, game, far = refuse_all(
        name, [["--env-id", env] for env in ("Cartpole-v1", "ALE/Pong-v5", "Nope-v5")], tmp_path
    )
    assert near.endswith("doesn't exist. Did you mean CartPole-v1 or CartPole-v0?")
    other = re.fullmatch(rf"{name}\.py: ALE/Pong-v5 is an Atari game: (\w+)\.py for those", game)[1]
    assert uses(other, "ale_py") and far.endswith("doesn't exist.")


@each_text("parse_args")
def test_a_gymnasium_that_is_too_old(name, tmp_path):
    line = refuse(name, cwd=tmp_path, driver="import gymnasium.vector as v; del v.AutoresetMode\n" + RUN)
    assert "too old" in line and "pip install 'gymnasium>=" in line


@each_text("parse_args", "fail")
def test_optional_packages(name, tmp_path):
    lines = refuse_all(name, [["--track"], ["--capture-video"]], tmp_path, hidden=("wandb", "moviepy"))
    for line, package in zip(lines, ("wandb", "moviepy"), strict=True):
        assert f"pip install {package}" in line
    run(script(name), *smoke(name), cwd=tmp_path, env=hiding(tmp_path, "wandb", "moviepy"))


@each_text("parse_args", "fail")
def test_unknown_flag_and_bad_resume(name, tmp_path):
    require_for(name)
    done = run(script(name), *smoke(name), "--no-such-flag", "3", cwd=tmp_path, code=2)  # short, if it is accepted
    assert "--no-such-flag" in done.stderr and "Traceback" not in done.stderr
    (tmp_path / "empty").mkdir()
    lines = refuse_all(name, [["--resume", "nowhere"], ["--resume", "empty"]], tmp_path)
    assert "nowhere" in lines[0] and "empty" in lines[1]
    assert not (tmp_path / "runs").exists()


@each_text("parse_args", "fail")
def test_resume_of_another_script(name, tmp_path):
    require_for(name)
    other = next(other for other in FILES if other != name and other != "ppo_atari")
    require_for(other)
    run(script(other), *smoke(other), cwd=tmp_path)
    shutil.move(tmp_path / "runs", tmp_path / "elsewhere")
    (folder,) = (tmp_path / "elsewhere").iterdir()
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    line = refuse(name, "--resume", folder, cwd=tmp_path)
    assert f"{name}.py" in line.removeprefix(f"{name}.py: ")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


# one file for each text of the check
NOT_FINITE = r"finite|means = "


@each_text(lines=NOT_FINITE, which=lambda name: "probes" not in LINEAGE[name])
def test_non_finite_loss(name, tmp_path):
    """Of the files that test_nan_rewards does not try."""
    assert_stops_on_non_finite_loss(name, smoke(name, checkpoint_freq=1, **step_sizes(name, "inf")), tmp_path)


@each_text(lines=NOT_FINITE, which=lambda name: family(name) in ("ppo", "pqn"))
def test_the_last_step_of_an_update_may_be_the_bad_one(name, tmp_path):
    """With one minibatch the first loss is finite, but the weights after its step are not: no checkpoint of those."""
    argv = smoke(name, **step_sizes(name, "inf"), checkpoint_freq=1, num_minibatches=1, update_epochs=1)
    assert_stops_on_non_finite_loss(name, argv, tmp_path)


@each_text(lines=NOT_FINITE, which=lambda name: "probes" in LINEAGE[name])
def test_nan_rewards(name, tmp_path):
    env_id = f"probe_envs:NanReward{LINEAGE[name]['probes'].capitalize()}-v0"
    assert_stops_on_non_finite_loss(name, smoke(name, env_id=env_id, checkpoint_freq=1, num_envs=1), tmp_path)


SPELLINGS = ["--save-model --no-track", "--save-model True --track False", "--save-model=True --track=False"]


@each_text("parse_args", "fail")
def test_booleans(name, monkeypatch):
    module = load(name)
    for spelling in [*SPELLINGS, "--save_model True --track=False"]:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *spelling.split()])
        args = module.parse_args()
        assert args.save_model is True and args.track is False, spelling
    flag = "cuda" if uses(name, "torch") else "capture_video"
    for spelling, value in [("--{}", True), ("--no-{}", False), ("--{} True", True), ("--{} False", False)]:
        monkeypatch.setattr("sys.argv", [f"{name}.py", *spelling.format(flag.replace("_", "-")).split(), "--seed", "3"])
        args = module.parse_args()
        assert getattr(args, flag) is value and args.seed == 3, spelling


@each_text("parse_args", "fail")
def test_a_value_that_reads_like_a_boolean_stays_a_value(name, monkeypatch):
    monkeypatch.setattr("sys.argv", [f"{name}.py", "--exp-name", "True", "--wandb-project-name", "x y=False"])
    args = load(name).parse_args()
    assert (args.exp_name, args.wandb_project_name) == ("True", "x y=False")
