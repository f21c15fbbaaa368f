"""Forwards from the published path to ../ppo_continuous_action_isaacgym.py, which see."""

from pathlib import Path

__file__ = str(Path(__file__).resolve().parents[1] / "ppo_continuous_action_isaacgym.py")
exec(compile(Path(__file__).read_text(encoding="utf-8"), __file__, "exec"))
