"""Under `python -i`, Ctrl+C in the middle of training leaves everything at hand."""

import re
import sys

from helpers.files import posix, script
from helpers.processes import environment


@posix
def test_ctrl_c_then_look_around(tmp_path):
    import pexpect

    env = environment(TERM="dumb", PYTHON_BASIC_REPL="1", NO_COLOR="1")
    argv = ["-i", str(script("ppo")), "--total-timesteps", "2000000"]
    child = pexpect.spawn(sys.executable, argv, cwd=str(tmp_path), env=env, encoding="utf-8", timeout=60)
    try:
        child.expect(r"step (?:[2-9]\d{3}|\d{5,})/\d+")  # some iterations of 512 steps
        child.sendintr()
        child.expect("KeyboardInterrupt")
        child.expect(">>> ")

        def answer(expression):
            child.sendline(f"print('<' + str({expression}) + '>')")
            child.expect(r"\r\n<(.*?)>\r\n>>> ")
            return child.match[1]

        number = r"-?\d+\.\d+(e-?\d+)?"
        assert re.fullmatch(number, answer("advantages.sum()"))
        assert answer("advantages.shape") == "(128, 4)"
        assert answer("rewards.shape") == "(128, 4)"
        assert answer("tuple(list(agent.actor)[0].weight.shape)") == "(64, 4)"
        assert answer("args.num_envs") == "4"
        assert re.match(rf"tensor\({number}", answer("pg_loss"))
        assert re.match(rf"tensor\({number}", answer("v_loss"))
        assert re.match(rf"tensor\({number}", answer("list(agent.critic)[0].weight.grad.sum()"))
    finally:
        child.close(force=True)
