"""Where cleanrl_utils/benchmark.py runs its cells. A new engine is a file in this folder and a row of ENGINES.

    python -m cleanrl_utils.benchmark --suite benchmark/suites/classic_control.toml --engine slurm --workers 20
    python -m cleanrl_utils.benchmark --suite benchmark/suites/classic_control.toml --engine ray --workers 20
    python -m cleanrl_utils.benchmark --suite benchmark/suites/classic_control.toml --engine aws-batch --workers 20 \\
        --aws-job-queue spot --aws-job-definition cleanrl --aws-workdir /mnt/efs/cleanrl

Each engine starts `cells.py MATRIX.json INDEX` for the cells that are missing; what became of one is read from its
folder. s3_worker.py and costs.py are for cleanrl_utils/submit_exp.py, which shares no folder. See
docs/advanced/engines.md.
"""

from collections.abc import Callable
from typing import NamedTuple

from cleanrl_utils.engines import aws_batch, local, ray, slurm


class Engine(NamedTuple):
    run: Callable  # run(matrix_path, board, options) -> whether it was interrupted
    add_arguments: Callable = lambda parser: None
    show: Callable | None = None  # what `run` would submit, for --workers 0; the commands of the cells without it


ENGINES = {
    "local": Engine(local.run),
    "slurm": Engine(slurm.run, slurm.add_arguments, slurm.show),
    "ray": Engine(ray.run, ray.add_arguments),
    "aws-batch": Engine(aws_batch.run, aws_batch.add_arguments, aws_batch.show),
}
