"""Chapter 4, the theory of FedP3 and LDP-FedP3: toy problems, certificates of dp-accounting, and an attack on them."""

import jax

from commjax.algorithms.fedp3 import private_training
from commjax.privacy import accounting
from experiments.fedp3 import theory as fedp3_theory
from experiments.scorecard.claims import Claim, corrected

METHOD = "LDP-FedP3"
TARGETS, DELTA, ROUNDS, RATE = (1.0, 4.0, 8.0), 1e-5, 25, 0.5


def certified() -> Claim:
    """Compare certificates with the attack, whose confidence is 99 % for each target."""
    found = [accounting.calibrate(epsilon, DELTA, RATE, ROUNDS) for epsilon in TARGETS]
    bounds = [private_training.audit(jax.random.key(i), one, 2000, 0.99) for i, one in enumerate(found)]
    inside = all(bound <= one.epsilon <= target for bound, one, target in zip(bounds, found, TARGETS))
    parts = [f"{one.epsilon:.2f} certified, {bound:.2f} by attack" for one, bound in zip(found, bounds)]
    return Claim(
        METHOD,
        "(epsilon, delta)-LDP for every client",
        "Thm L1779",
        "epsilon = 1, 4, 8 at delta = 1e-5, from a formula for sigma",
        "; ".join(parts) + f" ({ROUNDS} rounds, rate {RATE}, a row changed; noise from an accountant, "
        "2000 runs of the attack in each world)",
        *corrected(inside, "F20"),
    )


def formula() -> Claim:
    values = fedp3_theory.formula_noise(DELTA, 500, 1000, 1.0)
    found = [round(value, 2) for value in values.values()]
    return Claim(
        METHOD,
        "sigma^2 = c K C^2 log(1/epsilon) / (m^2 epsilon^2) is private",
        "Thm L1779",
        "epsilon = 1, with an unknown constant c; the printed logarithm is 0 there",
        "with log(1/delta) and c = 1, 1000 full rounds of 500 rows have epsilon = "
        + ", ".join(f"{value:.2f} ({name})" for name, value in values.items()),
        *corrected(found == [1.11, 2.40], "F20"),
    )


def scaled_noise() -> Claim:
    one = accounting.calibrate(1.0, DELTA, RATE, ROUNDS)
    seen = {gamma: accounting.guarantee(one.noise / gamma, RATE, ROUNDS, DELTA).epsilon for gamma in (0.5, 1.0, 2.0)}
    return Claim(
        METHOD,
        "Noise of variance sigma^2 is added to the weights, whatever the stepsize",
        "Alg. L4179",
        "epsilon = 1",
        "; ".join(f"epsilon = {value:.2f} at gamma = {gamma:g}" for gamma, value in seen.items())
        + "; scaled by gamma it is 1 for all of them",
        *corrected(seen[2.0] > 2 > 1 >= seen[1.0], "F16"),
    )


def floor() -> Claim:
    found, exact, printed = fedp3_theory.noise_floor(0.1, 100, 1000)
    agrees = abs(found / exact - 1) < 0.15 and found > printed
    return Claim(
        "FedP3",
        "min_k E |grad f(w^k)|^2 <= 2 (1 + Lbar L_max gamma^2)^K Delta_0 / (gamma K)",
        "Thm L1770",
        f"{printed:.1e} for two clients |w -+ c|^2 / 2, K = 100, Delta_0 = 1e-3",
        f"it starts at 2.0e-3 and grows to {found:.4f}: the sketch leaves gamma / (2 - gamma) = {exact:.4f} of the "
        "variance between clients",
        *corrected(agrees, "F11"),
    )


CLAIMS = [certified, formula, scaled_noise, floor]
