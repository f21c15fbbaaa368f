"""How many seeds find what drop, and how often equal versions are told apart: python tests/measure_compare.py 400

Scores of 100 with a spread of 10 over seeds. A shift of one side moves its interval and nothing else, so the upper end
of the interval of an equal pair is the drop from which on this pair would have been called worse.
"""

import sys

import numpy as np

from cleanrl_utils.compare import judge, verdict

SHAPES = {
    "normal": lambda rng, size: rng.normal(size=size),
    "log-normal": lambda rng, size: (1.38 - rng.lognormal(0, 0.8, size=size)) / 1.32,
    "t(3)": lambda rng, size: rng.standard_t(3, size=size) / 3**0.5,
    "two values": lambda rng, size: np.sign(rng.random(size) - 0.5),
}


def measure(shape, environments, seeds, pairs):
    rng, one, every, told = np.random.default_rng(seeds * 100 + environments), [], [], []
    for i in range(pairs):
        base, new = 100 + 10 * SHAPES[shape](rng, (2, environments, seeds))
        lines, overall = judge(base, new, reps=2000, seed=i)
        one.append(lines[0]["high"])
        every.append(min(line["high"] for line in (*lines, overall)))
        told.append(verdict(lines, overall))
    found = f"found in 4 of 5: one {np.quantile(one, 0.8):6.1f} %, all {np.quantile(every, 0.8):5.1f} %"
    found += f"; of 20 %: one {np.mean(np.less(one, 20)):.2f}, all {np.mean(np.less(every, 20)):.2f}"
    false = [100 * told.count(verdict) / pairs for verdict in ("worse", "better")]
    print(
        f"{shape:10} {environments:2} x {seeds:2} seeds: {found}; false worse {false[0]:.1f} %, better {false[1]:.1f} %"
    )


if __name__ == "__main__":
    for shape in SHAPES:
        for seeds in (3, 4, 5, 10, 20):
            for environments in (1, 3, 6, 12):
                if shape == "normal" or (seeds in (3, 5, 10) and environments < 12):
                    measure(shape, environments, seeds, int(sys.argv[1]))
