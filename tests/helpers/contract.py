"""The names of main blocks that tests may read: any other may be renamed without a thought for them.

`inspect_run` refuses code that reads a name of a main block which is not here.
"""

import ast
import functools
from pathlib import Path

NAMES = {  # for whom -> names
    "every file": """
        args run device envs eval_envs rng global_step obs next_obs actions terminated truncated act update logged
        b_obs b_actions target optimizer losses lr weights loss_names
    """,
    "rollouts": """
        agent batch_size minibatch_size num_iterations iteration epoch step steps_envs inds rewards dones final_values
        value advantages returns scaled_rewards b_logprobs b_values b_advantages b_returns approx_kl old_approx_kl
    """,
    "replay": "replay q_network target_network target_weights epsilon gradient_steps learner",
    "actors and critics": """
        actor qf target_qf target_qf_weights actor_optimizer qf_optimizer alpha_optimizer log_alpha target_entropy
        update_qf qf_means learn action low high action_dim
    """,
    "atoms": "support",
    "memory": "initial_state act_state starts b_starts b_inds minibatch_envs",
    "several processes": "b_standardized gradient descend",
    "compiled training": "games rollout targets",
    "ppo_trxl": "windows elapsed b_elapsed ent_coef",
    "ppo_rnd": "curiosity b_next_frames b_int_returns",
    "ppg": "aux aux_batch_rollouts aux_step_rollouts aux_update aux_losses",
    "rainbow": "beta",
    "qdagger": "teacher teacher_network teacher_params distill_coeff",
    "apex": "epsilons actor_restarts",
}
CONTRACT = {name for names in NAMES.values() for name in names.split()}


def made(tree):
    """The names that some code assigns or defines."""
    nodes = [*ast.walk(tree)]
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return names | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}


@functools.cache
def made_by_main(path):
    """The names that the main block of a file makes, and nothing above it."""
    *above, main = ast.parse(Path(path).read_text()).body
    above = {name for node in above for name in ([node.name] if hasattr(node, "name") else made(node))}
    return made(main) - above


@functools.cache
def read_by(code):
    """The names that some code reads without having made them."""
    tree = ast.parse(code)
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - made(tree) - arguments


def check(path, code):
    """Refuse code that reads what is not in the contract."""
    beyond = read_by(code) & made_by_main(path) - CONTRACT
    assert not beyond, f"names of {Path(path).name}'s main block that tests/helpers/contract.py has not: {beyond}"
