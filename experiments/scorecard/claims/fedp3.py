"""The claims of Chapter 4 about FedP3 itself: counts, special cases, and the contents of the uploads."""

from functools import cache

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from commjax.algorithms import fedavg, fedp3
from commjax.algorithms.fedp3 import aggregation, layers, plans
from commjax.algorithms.fedp3 import wire as fedp3_wire
from commjax.core import local, runner
from commjax.data.stacked import Examples
from commjax.models import layered, networks
from experiments import plots
from experiments.fedp3 import counts
from experiments.scorecard.claims import Claim, corrected, reproduced

METHOD = "FedP3"
N, ROWS = 8, 12


@cache
def small():
    """Return eight clients with random rows, and a network of five layers: data, problem, params, layers."""
    rng = np.random.default_rng(0)
    data = Examples(
        jnp.asarray(rng.standard_normal((N, ROWS, 16))),
        jnp.asarray(rng.integers(0, 10, (N, ROWS)), jnp.int32),
        jnp.full((N, ROWS), 1 / ROWS),
    )
    problem = networks.classification(layered.LayeredMlp(widths=(12, 10, 8, 8), dtype=jnp.float64))
    params = problem.init(jax.random.key(0), data.inputs[0, :1])
    return data, problem, params, layered.layers(params)


def percentages() -> Claim:
    found = {name: counts.count(name, 0.5) for name in counts.TABLES}
    right = all(round(row["spread"], 2) == round(row["printed"], 2) or name == "CIFAR10" for name, row in found.items())
    right &= round(found["CIFAR10"]["spread"]) == 10815
    most, least = max(found["CIFAR10"]["sent"]), min(found["CIFAR10"]["sent"])
    figure, axes = plt.subplots(figsize=(3.4, 2.2), layout="constrained")
    row = found["CIFAR10"]
    hidden = list(row["layers"])[:-1]
    axes.bar(np.arange(4), row["deployed"], 0.4, color="#E69F00", label="deployed, keep 0.5")
    axes.bar(np.arange(4) + 0.4, row["sent"], 0.4, color="#0072B2", label="sent")
    axes.set_yscale("log")
    axes.set_xticks(np.arange(4) + 0.2, hidden)
    axes.set_ylabel("params")
    axes.legend()
    return Claim(
        METHOD,
        "A client that trains fc1 sends 10,815 times as much as one that trains conv1 (CIFAR10); 1522.91, "
        "13749.46, 30.23 elsewhere",
        "L1825, L4037",
        "ratios 10815, 1522.91, 13749.46, 30.23",
        f"{', '.join(format(row['spread'], '.2f') for row in found.values())}: all are 100 (max - min) / min of "
        f"params(layer) + params(ffc); {most / least:.2f} times as much on CIFAR10",
        *corrected(right, "F1"),
        figure=plots.png(figure),
    )


def deployed() -> Claim:
    sizes = counts.count("CIFAR10", 0.5)["deployed"]
    larger, smaller = plans.relative_spread(sizes), 100 * (1 - min(sizes) / max(sizes))
    return Claim(
        METHOD,
        "At keep ratio 0.5 the model of a conv1 client is 57.93 % smaller than that of an fc1 client",
        "L4037",
        "57.93 % smaller",
        f"the fc1 client's is {larger:.2f} % larger, the conv1 client's {smaller:.2f} % smaller",
        *corrected(round(larger, 2) == 57.93, "F3"),
    )


def shares() -> Claim:
    sizes = np.array(list(counts.count("CIFAR10", 0.9)["layers"].values()))
    sent = [100 * counts.expected_share(sizes, number) for number in (3, 2, 1)]
    names = layered.layers(counts.shapes_of(*counts.TABLES["CIFAR10"]))
    drawn = [
        100 * plans.uplink_sizes(plans.opu(names, 5000, number), sizes).mean() / sizes.sum() for number in (3, 2, 1)
    ]
    agree = np.allclose(sent, drawn, atol=1.5)
    return Claim(
        METHOD,
        "OPU3, OPU2 and LowerB save 20, 40 and 60 % of the communication; only 80 % of the parameters are sent",
        "L1824",
        "80, 60 and 40 %",
        f"of the layers; of the params {sent[0]:.2f}, {sent[1]:.2f} and {sent[2]:.2f} % in expectation "
        f"({drawn[0]:.1f}, {drawn[1]:.1f}, {drawn[2]:.1f} over 5,000 drawn clients), uplink only",
        *corrected([round(share, 2) for share in sent] == [75.09, 50.18, 25.27] and agree, "F5"),
    )


def is_fedavg() -> Claim:
    data, problem, params, names = small()
    hparams, sample = fedavg.HParams(0.1, 1.0), local.minibatch(4)
    ends = []
    for algorithm in (
        fedp3.fedp3(problem.loss, plans.everything(names, N), sample, steps=3, over=jax.vmap),
        fedavg.fedavg(jax.value_and_grad(problem.loss), sample, steps=3),
    ):
        state, _ = runner.run(jax.random.key(1), algorithm, hparams, algorithm.init(params, jnp.arange(N)), data, 10)
        ends.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(state.server.params)]))
    apart = float(np.abs(ends[0] - ends[1]).max())
    moved = float(np.abs(ends[1] - np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])).max())
    return Claim(
        METHOD,
        "With all layers and no pruning it is FedAvg",
        "Alg. FedP3, L1657",
        "the same method",
        f"largest difference {apart:.1e} after 10 rounds of 3 local steps that moved params by up to {moved:.2f}",
        *reproduced(apart < 1e-12 < moved),
    )


def never_leaves() -> Claim:
    data, problem, params, names = small()
    plan = plans.opu(names, N, 1, 2, keep=0.7)
    method = fedp3.Method(problem.loss, plan, steps=2)
    state = method.init(params, jnp.arange(N))
    leaked = outside = sent = 0
    for i in range(2):
        rows = jax.tree.map(lambda leaf, i=i: leaf[i], data)
        up = method.messages(jax.random.key(1), fedavg.HParams(0.1, 1.0), state, rows, i).up
        part = fedp3_wire.read_up(fedp3_wire.format_of(plan, i, params, pruning=method.pruning), up, params)
        numbers = np.frombuffer(up, np.float64)
        mine, other = layers.split(names, params, plan.trained[i])
        leaked += len(set(numbers.tolist()) & {x for leaf in jax.tree.leaves(other) for x in np.ravel(leaf).tolist()})
        outside += len(numbers) - sum(leaf.size for leaf in jax.tree.leaves(part))
        sent += len(numbers) - sum(leaf.size for leaf in jax.tree.leaves(mine))
    exact = 8 * len(up) == method.ledger(params)["up"][1]
    return Claim(
        METHOD,
        "Only the layers of L_i are sent to the server",
        "line 12 of Alg. FedP3, L1672",
        "nothing else leaves",
        f"{leaked} of the other layers' numbers in the encoded messages, {outside + sent} numbers too many; the "
        f"ledger {'is' if exact else 'is not'} 8 bits a byte (hiding layers is no privacy guarantee: see LDP-FedP3)",
        *reproduced(leaked == outside == sent == 0 and exact),
    )


def weights() -> Claim:
    six = layers.Layers(tuple("abcdef"), tuple(range(6)))
    plan = plans.plan(six, ["af", "abcdef", "bcdf"])
    sent = {name: jnp.array([10.0, 20.0, 0.0]) for name in "abcdef"}
    logits = jnp.asarray(aggregation.weighted().logits(plan.trained))
    found = float(aggregation.joined(six, sent, aggregation.weights(logits, jnp.asarray(plan.trained)))["a"])
    printed = (2 * 10 + 6 * 20) / plan.trained.sum()
    return Claim(
        METHOD,
        "Weighted averaging: alpha_i = |L_i| / sum_j |L_j| over all clients",
        "L1726, L1918",
        "an average",
        f"clients with 2 and 6 layers that sent 10 and 20 give {printed:.2f} as printed (weights sum to "
        f"{8 / 12:.2f}, the layer shrinks every round), {found:.2f} normalised over the layer's holders",
        *corrected(abs(found - 17.5) < 1e-12 and abs(printed - 35 / 3) < 1e-12, "F8"),
    )


CLAIMS = [percentages, deployed, shares, is_fedavg, never_leaves, weights]
