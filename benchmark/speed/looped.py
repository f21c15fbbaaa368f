"""Texts of c51.py whose projection loops over the batch, with everything else unchanged: what the loop costs."""

SAMPLE_BY_SAMPLE = """
project_batch = project


def project(pmfs, rewards, terminated, support, gamma):
    samples = zip(pmfs.split(1), rewards.split(1), terminated.split(1))
    return torch.cat([project_batch(*sample, support, gamma) for sample in samples])


"""
ONLY_THE_SUMS = """
def project(pmfs, rewards, terminated, support, gamma):
    last = len(support) - 1
    values = rewards[:, None] + gamma * (1 - terminated)[:, None] * support
    positions = ((values - support[0]) * (last / (support[-1] - support[0]))).clamp(0, last)
    lower = positions.long().clamp(0, last - 1)
    upper_mass = pmfs * (positions - lower)
    lower_mass, upper, projected = pmfs - upper_mass, lower + 1, torch.zeros_like(pmfs)
    for i in range(len(pmfs)):
        projected[i].index_add_(0, lower[i], lower_mass[i])
        projected[i].index_add_(0, upper[i], upper_mass[i])
    return projected


"""
MAIN = 'if __name__ == "__main__":\n'


def c51_looped(text):
    """The whole projection, one sample at a time."""
    return text.replace(MAIN, SAMPLE_BY_SAMPLE + MAIN)


def c51_looped_sums(text):
    """Positions and masses of the whole batch at once, but the sums over them one sample at a time."""
    return text.replace(MAIN, ONLY_THE_SUMS + MAIN)
