"""The Gaussian mechanism in figures: the noise that (ε, δ) needs, and the ε that several releases together have cost.

Throughout, σ is the noise multiplier: the noise's standard deviation over the sensitivity of what is released.
"""

import math
from functools import cache
from importlib.util import find_spec

ACCOUNTANTS = ("exact", "dp_accounting")


def needed_sigma(epsilon: float, delta: float) -> float:
    """The σ above which one release is (ε, δ)-private, for ε ≤ 1: sqrt(2 log(1.25/δ))/ε (Dwork and Roth 2014, A.1)."""
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def mean_sensitivity(samples: float, bound: float) -> float:
    """How far the mean of `samples` numbers in ±`bound` moves when one of them is replaced: 2ζ/N."""
    return 2 * bound / samples


def noise_variance(samples: float, bound: float, sigma: float) -> float:
    """Of the noise on such a mean."""
    return (mean_sensitivity(samples, bound) * sigma) ** 2


def spent_delta(sigma: float, epsilon: float, releases: int = 1) -> float:
    """The least δ for which `releases` releases together are (ε, δ)-private.

    Together they are one release with σ/√releases, whose δ is known in closed form (Balle and Wang, ICML 2018,
    Theorem 8): Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ) with μ = √releases/σ.
    """
    from scipy.special import log_ndtr

    mu = math.sqrt(releases) / sigma
    low, high = log_ndtr([-mu / 2 - epsilon / mu, mu / 2 - epsilon / mu])
    return float(math.exp(high) - math.exp(min(epsilon + low, high)))


def spent_epsilon(sigma: float, delta: float, releases: int = 1, accountant: str = "exact") -> float:
    """The ε for which `releases` releases together are (ε, δ)-private; infinite without noise.

    Parameters
    ----------
    accountant : `exact` (the least ε, by bisection of `spent_delta`) or `dp_accounting` (that package's privacy loss
        distributions, which also compose other mechanisms; here both agree).
    """
    if not releases:
        return 0.0
    if not sigma:
        return math.inf
    if accountant == "dp_accounting":
        return _by_package(sigma, delta, releases)
    if spent_delta(sigma, 0, releases) <= delta:
        return 0.0
    low, high = 0.0, renyi_epsilon(sigma, delta, releases)
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if spent_delta(sigma, middle, releases) > delta else (low, middle)
    return high


def renyi_epsilon(sigma: float, delta: float, releases: int = 1) -> float:
    """A simple bound on `spent_epsilon`.

    One release has a Rényi divergence of αρ, ρ = 1/(2σ²), at every order α; they add up, and the best α gives
    ε = tρ + 2 sqrt(tρ log(1/δ)) (Bun and Steinke, TCC 2016, Proposition 1.3).
    """
    rho = releases / (2 * sigma**2)
    return rho + 2 * math.sqrt(rho * math.log(1 / delta))


def accountant_problems(accountant: str) -> list[str]:
    """Why this accountant cannot be used, if it cannot."""
    if accountant not in ACCOUNTANTS:
        return [f"algorithm.accountant={accountant} does not exist; there are {', '.join(ACCOUNTANTS)}."]
    if accountant == "dp_accounting" and find_spec("dp_accounting") is None:
        return [
            "algorithm.accountant=dp_accounting needs the package dp-accounting, which is not installed. "
            "Type pip install 'fedkd[privacy]', or algorithm.accountant=exact, which needs nothing."
        ]
    return []


@cache
def _by_package(sigma: float, delta: float, releases: int) -> float:
    from dp_accounting import GaussianDpEvent
    from dp_accounting.pld import PLDAccountant

    return float(PLDAccountant().compose(GaussianDpEvent(sigma), releases).get_epsilon(delta))
