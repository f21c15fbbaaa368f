"""What cells on AWS Batch will cost, as far as that can be known before they run: hours x price, with their sources.

No price is written down here. One of a cell and hour comes from the command line or from AWS: the Spot price history,
or the price list of on-demand machines. The hours come from the command line or from measured speeds: cells of the same
kind that are done in S3, or runs/ of this machine. Speeds are averaged as seconds per step (the harmonic mean).
"""

import json
import re
import statistics
from datetime import UTC, datetime
from pathlib import Path

from cleanrl_utils import counted
from cleanrl_utils.engines import cells, s3_worker


def steps_of(cell):
    """The environment steps of a cell: from its command, or the default of its script; None if neither says."""
    words, script = " ".join(cell["command"]), cells.script_of(cell["command"])[1]
    text = Path(script).read_text() if script and Path(script).is_file() else ""
    found = re.findall(r"--total[-_]timesteps[ =]([\d_]+)", words) or re.findall(
        r"(?m)^ {4}total_timesteps: int = ([\d_]+)", text
    )
    return int(found[-1]) if found else None


def kind(cell):
    return Path(cells.script_of(cell["command"])[1] or cell["command"][0]).name, cell["env_id"]


def local_speeds(kinds, runs, newest=3):
    """(script, environment) -> steps per second of some finished or unfinished runs on this machine."""
    from cleanrl_utils.runs.events import read_scalars

    found = {}
    for args in sorted(Path(runs).glob("*/args.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        scripts = [path.name for path in args.parent.glob("*.py")]
        pair = scripts[0] if scripts else "", (cells.read_json(args) or {}).get("env_id")
        if pair in kinds and len(found.get(pair, [])) < newest:
            rates = read_scalars(args.parent).get("charts/SPS", [])
            found.setdefault(pair, []).extend(rates[-1:, 1].tolist() if len(rates) else [])
    return {pair: statistics.harmonic_mean(rates) for pair, rates in found.items() if rates}


def measured_speeds(matrix, states):
    """(script, environment) -> steps per second of the cells that are done, by their states in S3."""
    rates = {}
    for cell, state in zip(matrix, states):
        steps = steps_of(cell)
        if state and state["state"] == "done" and steps and state["seconds"]:
            rates.setdefault(kind(cell), []).append(steps / state["seconds"])
    return {pair: statistics.harmonic_mean(values) for pair, values in rates.items()}


def hours_of(matrix, measured, local, given=None):
    """Hours of each cell, None if unknown, and a line that says how they are known.

    `measured`: (script, environment) -> steps per second of cells that are done on the machines in question.
    """
    if given is not None:
        return [given] * len(matrix), f"{given:g} h a cell (--hours-per-cell)"
    hours, sources, unknown = [], set(), set()
    for cell in matrix:
        script, _ = pair = kind(cell)
        steps, rate = steps_of(cell), None
        for speeds, source in (measured, "cells done in S3"), (local, "runs of this machine: yours may differ"):
            same = [speed for (name, _), speed in speeds.items() if name == script]
            rate = rate or speeds.get(pair) or (statistics.harmonic_mean(same) if same else None)
            if rate and steps:
                sources.add(source)
                break
        hours.append(steps / rate / 3600 if steps and rate else None)
        unknown |= {script} if hours[-1] is None else set()
    known = [value for value in hours if value is not None]
    line = f"{min(known):.2f} to {max(known):.2f} h a cell, {sum(known):.1f} h in all" if known else "unknown"
    line += f" (steps / speed of {', '.join(sorted(sources))})" if sources else ""
    if unknown:
        count = len(hours) - len(known)
        line += (
            f"; no measured speed for {counted(count, 'cell')} of {', '.join(sorted(unknown))}: give --hours-per-cell"
        )
    return hours, line


def machines_of(batch, queue):
    """The types of machines behind a queue, and whether they are Spot machines."""
    (found,) = batch.describe_job_queues(jobQueues=[queue])["jobQueues"]
    names = [place["computeEnvironment"] for place in found["computeEnvironmentOrder"]]
    listed = batch.describe_compute_environments(computeEnvironments=names)["computeEnvironments"]
    resources = [environment.get("computeResources", {}) for environment in listed]
    spot = bool(resources) and all("SPOT" in part.get("type", "") for part in resources)
    return sorted({name for part in resources for name in part.get("instanceTypes", [])}), spot


def spot_price(ec2, machine):
    """The highest of the present Spot prices of a type in the zones of the region."""
    query = {"InstanceTypes": [machine], "ProductDescriptions": ["Linux/UNIX", "Linux/UNIX (Amazon VPC)"]}
    history = ec2.describe_spot_price_history(**query, StartTime=datetime.now(UTC))["SpotPriceHistory"]
    return max(float(entry["SpotPrice"]) for entry in history) if history else None


def list_price(pricing, machine, region):
    """The on-demand price of a type, from the price list of AWS."""
    values = {"instanceType": machine, "regionCode": region, "operatingSystem": "Linux", "tenancy": "Shared"}
    values |= {"preInstalledSw": "NA", "capacitystatus": "Used"}
    filters = [{"Type": "TERM_MATCH", "Field": name, "Value": value} for name, value in values.items()]
    prices = []
    for product in pricing.get_products(ServiceCode="AmazonEC2", Filters=filters)["PriceList"]:
        for term in json.loads(product)["terms"].get("OnDemand", {}).values():
            prices += [float(part["pricePerUnit"]["USD"]) for part in term["priceDimensions"].values()]
    return max(prices, default=None)


def share_of(size, vcpus, memory, gpus):
    """The part of a machine that a cell pays for, if as many run there as fit in; above 1 if none does."""
    whole = sum(gpu["Count"] for gpu in size.get("GpuInfo", {}).get("Gpus", []))
    share = max(vcpus / size["VCpuInfo"]["DefaultVCpus"], memory / (0.93 * size["MemoryInfo"]["SizeInMiB"]))
    share = max(share, gpus / (whole or 1))  # the system needs some of the memory
    return share if share > 1 else 1 / int(1 / share + 1e-9)


def asked_price(batch, queue, machine, vcpus, memory, gpus, region):
    """USD for a cell and hour on the dearest of the types of machines, and a line that says how it is known.

    A cell that is too large for one pays for as many as would hold it: the larger sizes of a family cost as much.
    """
    types, spot = machines_of(batch, queue)
    types = [machine] if machine else [name for name in types if name != "optimal"]
    types = [name if "." in name else f"{name}.large" for name in types]  # a family counts by its size `large`
    if not types:
        return None, "unknown: the queue does not name types of machines; give --instance-type or a price"
    ec2, found = s3_worker.connect("ec2", region_name=region), []
    pricing = None if spot else s3_worker.connect("pricing", region_name="us-east-1")
    known = ec2.describe_instance_types(Filters=[{"Name": "instance-type", "Values": types}])["InstanceTypes"]
    for size in known:
        name = size["InstanceType"]
        price = spot_price(ec2, name) if spot else list_price(pricing, name, region)
        share = share_of(size, vcpus, memory, gpus)
        if price is not None:
            found.append((price * share, price, name, share))
    if not found:
        return None, f"unknown: AWS names no price for {', '.join(types)}; give --price-per-vcpu-hour"
    cell, price, name, share = max(found)
    source = "highest Spot price of the zones now" if spot else "on-demand price list"
    part = f"{share:.3g} of a {name} at ${price:.4g} ({source}, {region}, {datetime.now(UTC):%Y-%m-%d})"
    return cell, f"${cell:.4g} for a cell and hour: {part}"


def lines_of(hours, hours_line, price, price_line, attempts, timeout):
    """The estimate, as lines to print. What is unknown is named, and the formula shown with the rest."""
    known, cells_number = [value for value in hours if value is not None], len(hours)
    cost = "unknown" if price is None else f"${price:.4g}"
    yield f"  hours: {hours_line}"
    yield f"  price: {price_line}"
    amount = f"{sum(known):.1f} h x {cost}"
    if price is not None and len(known) == cells_number:
        yield f"  estimate: {amount} = ${sum(known) * price:.2f}"
    else:
        missing = cells_number - len(known)
        unknown = f"{counted(missing, 'cell')} x unknown hours x {cost}"
        more = f" + {unknown}" if missing else ""
        least = f", so more than ${sum(known) * price:.2f}" if known and price is not None else ""
        yield f"  estimate: {f'{amount}{more}' if known else unknown}{least}"
    bound = f"{counted(cells_number, 'cell')} x {counted(attempts, 'attempt')} x {timeout:g} h x {cost}"
    most = "" if price is None else f" = ${cells_number * attempts * timeout * price:.2f}"
    yield f"  upper bound: {bound}{most}, if every attempt lasts as long as the timeout"
    yield "  This is for machines that are full of cells; storage, traffic, logs and images cost extra."
