"""Which runs belong together: without repetitions, in groups that have a name, and with words for what differs.

A group is what a curve is of: the runs of an algorithm in an environment with as many steps. Settings that share seeds
are groups of their own, as a mean over these would average a change away.
"""

import json
import math
from collections import Counter, defaultdict

from cleanrl_utils.runs import results

MOST_SETTINGS = 3  # flags that a label names; beyond, settings are numbered
# Flags that say nothing about learning, or have a place of their own in the page.
ASIDE = set(
    "seed exp_name env_id total_timesteps track wandb_project_name wandb_entity capture_video save_model upload_model "
    "hf_entity resume checkpoint_freq".split()
)


def without_duplicates(runs):
    """The runs without those that are there twice: same seed, flags and commit, or a record of a run that is there.

    The same seed again tells nothing new about the spread. Of two, the one that has ended, or else the later, is kept.
    """
    kept, alike = {}, defaultdict(list)
    for run in runs:
        flags = run.args if run.source == "run" else run.command
        key = (
            run.source,
            run.env_id,
            run.exp_name,
            run.seed,
            run.total_timesteps,
            run.commit,
            json.dumps(flags, default=str),
        )
        if key not in kept or (run.ended, run.last_step) >= (kept[key].ended, kept[key].last_step):
            kept[key] = run
    for run in kept.values():
        if run.source == "run":
            alike[run.env_id, run.exp_name, run.seed, run.total_timesteps].append(run)

    def recorded(record):
        """Whether a record is of a run that is there; its score is rounded."""
        runs = alike[record.env_id, record.exp_name, record.seed, record.total_timesteps]
        scores = [run.score for run in runs if results.of_commit(record, run.commit)]
        return any(math.isclose(score, record.score, rel_tol=1e-4, abs_tol=0.006) for score in scores)

    return [run for run in kept.values() if run.source == "run" or not recorded(run)]


def flag_of(run, flag):
    """The value of a flag as text, that of the script's default where a record does not say it; None if not known."""
    value = results.default(run.script, flag) if flag not in run.args else str(run.args[flag])
    return value and results.plain(value)


def settings_apart(runs):
    """The flags, and "commit", in which runs of an algorithm differ that repeat the same seed: no mean over these."""
    again, apart = defaultdict(list), set()
    for run in runs:
        again[run.env_id, run.total_timesteps, run.seed].append(run)
    for alike in (group for group in again.values() if len(group) > 1):
        for flag in {flag for run in alike for flag in run.args} - ASIDE - apart:
            if len({flag_of(run, flag) for run in alike} - {None}) > 1:
                apart.add(flag)
        if len({run.commit for run in alike}) > 1:
            apart.add("commit")
    return apart


def setting_of(run, apart):
    """What tells the setting of a run from the others, in words for a label."""
    commit = "+".join(word[:7] for word in run.commit.split()) or "?"
    words = [f" · {flag}={flag_of(run, flag) or '–'}" for flag in sorted(apart - {"commit"})]
    return "".join(words) + (f" @ {commit}" if "commit" in apart else "")


def group_names(runs, labels=None):
    """The name of each run's group: its algorithm, and what differs between settings that share seeds."""
    own, names = defaultdict(list), [""] * len(runs)
    for i, run in enumerate(runs):
        own[run.exp_name].append(i)
    for algorithm, group in own.items():
        apart = settings_apart([runs[i] for i in group])
        texts = [setting_of(runs[i], apart) for i in group]
        if len(apart) > MOST_SETTINGS:  # of a search, say
            numbers = {text: f" · setting {n}" for n, text in enumerate(dict.fromkeys(texts), 1)}
            texts = [numbers[text] for text in texts]
        for i, text in zip(group, texts):
            names[i] = (labels or {}).get(algorithm, algorithm) + text
    return names


def unnamed_differences(runs, names):
    """environment -> algorithm -> the flags, and "commit", in which its groups differ though no label says so."""
    own, found = defaultdict(list), defaultdict(dict)
    for run, name in zip(runs, names, strict=True):
        own[run.env_id, run.exp_name].append((run, name))
    for (env_id, algorithm), group in own.items():
        if len({(name, run.total_timesteps) for run, name in group}) < 2:
            continue
        flags = {flag for run, _ in group for flag in run.args} - ASIDE
        flags = {flag for flag in flags if len({flag_of(run, flag) for run, _ in group} - {None}) > 1}
        flags = {flag for flag in flags if not all(f" · {flag}=" in name for _, name in group)}
        commits = {word[:7] for run, _ in group for word in run.commit.split()}
        if len(commits) > 1 and not all(" @ " in name for _, name in group):
            flags.add("commit")
        if flags:
            found[env_id][algorithm] = sorted(flags)
    return found


def differences_in_words(runs, names, labels):
    """The same in sentences, those of several environments together."""
    found = defaultdict(list)
    for env_id, algorithms in unnamed_differences(runs, names).items():
        for algorithm, flags in algorithms.items():
            found[labels.get(algorithm, algorithm), ", ".join(flags)].append(env_id)
    return [f"Lines of {name} in {', '.join(envs)} also differ in {flags}." for (name, flags), envs in found.items()]


def name_runs(runs):
    """A name for each run that nothing else has, for links: that of its folder, or what a record says of it."""
    names, seen = [], Counter()
    folders = Counter(run.folder for run in runs)
    for run in runs:
        name = run.folder.name if run.folder else f"{run.env_id}__{run.exp_name}__{run.seed}"
        name += f"__seed{run.seed}" if run.folder and folders[run.folder] > 1 else ""  # many seeds trained side by side
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names


def group_runs(runs, names):
    """The indices of the runs of each environment and name; runs with other numbers of steps are kept apart."""
    groups = defaultdict(list)
    for i, (run, name) in enumerate(zip(runs, names, strict=True)):
        groups[run.env_id, name, run.total_timesteps].append(i)
    return groups
