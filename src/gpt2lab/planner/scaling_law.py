"""A scaling law of your own runs: fit of L(N, D) = E + A / N^a + B / D^b, bootstrap, prediction intervals. No torch.

As Hoffmann et al. 2022 (arXiv:2203.15556, section 3.3): the Huber loss of the residuals of log L, from many starts. N
and D are divided by their geometric means, and all five parameters are logarithms, so that they are of one scale and
positive. All starts, and all bootstrap samples, are fitted at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpt2lab.errors import ConfigError
from gpt2lab.training.progress import Interval

PARAMETERS = 5  # of the law
SAMPLES = 500  # of the bootstrap
_SEED = 1337  # of the bootstrap
_HUBER = 1e-3  # Hoffmann et al.; where the residuals are larger, a multiple of their spread takes its place
_HUBER_SPREADS = 1.345  # 95 % of the efficiency of least squares on normal errors
_ROUNDS = 4  # of that spread and the fit
_MEDIAN = 0.6745  # of the absolute value of a normal error, in deviations
_NEW_SEEDS = 16  # of a predicted rung, at most: the mean of more is as sure as that of these
_STEPS = 100  # of the optimizer, at most
_LEAST, _MOST = 0.02, 3.0  # bounds of the exponents
_LOG = 60.0  # of parameters and tokens, at most
_SHARE = math.log(1e-4)  # least share of each term in the smallest loss

Array = np.ndarray


@dataclass(frozen=True)
class Law:
    """Nats a token of N parameters trained on D tokens: E + A / N^alpha + B / D^beta."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Return the loss, nats a token."""
        return self.E + self.A / parameters**self.alpha + self.B / tokens**self.beta

    @property
    def formula(self) -> str:
        """The law with its numbers."""
        return f"{self.E:.4g} + {self.A:.4g}/N^{self.alpha:.3g} + {self.B:.4g}/D^{self.beta:.3g}"

    def optimum(self, flops: float) -> tuple[float, float]:
        """Return parameters and tokens of the lowest loss at 6 N D = `flops` (Hoffmann et al., equation 4)."""
        a, b, size = self.alpha, self.beta, math.log(flops / 6)
        scale = math.log(a * self.A / (b * self.B)) / (a + b)
        best = (scale + size * b / (a + b), size * a / (a + b) - scale)
        return math.exp(min(max(best[0], 0.0), _LOG)), math.exp(min(max(best[1], 0.0), _LOG))


@dataclass(frozen=True)
class Rung:
    """One size trained on one number of tokens; the last validation loss of each seed, nats a token."""

    parameters: int
    tokens: int
    losses: tuple[float, ...]


@dataclass(frozen=True)
class Point:
    """A predicted loss, with its 80 % interval for the mean of `seeds` new runs."""

    parameters: int
    tokens: int
    seeds: int
    loss: Interval


@dataclass(frozen=True)
class Fit:
    """A law fitted to rungs, and its uncertainty: laws of the bootstrap and the errors of new runs beside them."""

    law: Law
    rungs: tuple[Rung, ...]
    seed_spread: float | None  # deviation of log L between seeds of one rung; None of single seeds
    misfit: float  # deviation of the rungs' mean log L from the law, beyond that of their seeds
    centre: tuple[float, float]  # geometric means of parameters and tokens
    theta: Array  # (samples, 5)
    rung_errors: Array  # (samples,)
    seed_errors: Array  # (samples, seeds)

    @functools.cached_property
    def laws(self) -> list[Law]:
        """The laws of the bootstrap."""
        return [_law_of(theta, self.centre) for theta in self.theta]

    def predict(self, parameters: int, tokens: int, *, seeds: int = 1) -> Point:
        """Return the loss of new runs: the interval holds the law's error, its misfit and the noise of seeds."""
        x = math.log(parameters / self.centre[0])
        y = math.log(tokens / self.centre[1])
        refitted = _log_loss(self.theta, np.array([x]), np.array([y]))[:, 0]
        new = refitted + self.rung_errors + self.seed_errors[:, :seeds].mean(1)
        low, high = np.exp(np.quantile(new, (0.1, 0.9))).tolist()
        value = self.law.loss(parameters, tokens)
        at = Interval(value, min(low, value), max(high, value))
        return Point(parameters, tokens, seeds, at)

    def optimum(self, flops: float) -> dict[str, Interval]:
        """Return parameters, tokens and loss of the best use of 6 N D = `flops`, with their 80 % intervals."""
        best = self.law.optimum(flops)
        others = np.array([law.optimum(flops) for law in self.laws])
        low, high = np.quantile(others, (0.1, 0.9), axis=0)
        found = {}
        for name, value, a, b in zip(("parameters", "tokens"), best, low, high, strict=True):
            found[name] = Interval(value, float(min(value, a)), float(max(value, b)))
        return found | {"loss": self.predict(round(best[0]), round(best[1])).loss}

    def intervals(self) -> dict[str, Interval]:
        """Return the 80 % interval of E and of both exponents."""
        found = {}
        for name in ("E", "alpha", "beta"):
            low, high = np.quantile([getattr(law, name) for law in self.laws], (0.1, 0.9))
            found[name] = Interval(getattr(self.law, name), float(low), float(high))
        return found


def require_enough(rungs: Sequence[tuple[int, int]]) -> None:
    """Reject rungs, each as (parameters, tokens), that cannot tell the five parameters of a law.

    Raises: ConfigError.
    """
    for name, values in (
        ("sizes", {parameters for parameters, _ in rungs}),
        ("numbers of tokens", {tokens for _, tokens in rungs}),
    ):
        if len(values) < 3:
            raise ConfigError(
                f"a law needs at least 3 {name}, and these rungs have {len(values)}: add rungs"
            )
    if len(rungs) <= PARAMETERS:
        raise ConfigError(
            f"{len(rungs)} rungs for a law of {PARAMETERS} parameters: add rungs, at least to 6"
        )


def fit_law(rungs: Sequence[Rung], *, samples: int = SAMPLES) -> Fit:
    """Fit a law to rungs.

    Raises: ConfigError if they cannot determine five parameters.
    """
    require_enough([(rung.parameters, rung.tokens) for rung in rungs])
    for rung in rungs:
        if not rung.losses or not all(0 < loss < math.inf for loss in rung.losses):
            raise ConfigError(
                f"losses {rung.losses} of {rung.parameters:,} parameters after {rung.tokens:,} tokens: "
                f"each must be a number above 0"
            )
    counts = np.array([len(rung.losses) for rung in rungs])
    of_rung = np.repeat(np.arange(len(rungs)), counts)
    N = np.array([rung.parameters for rung in rungs], float)[of_rung]
    D = np.array([rung.tokens for rung in rungs], float)[of_rung]
    logs = np.log(np.concatenate([rung.losses for rung in rungs]))
    centre = float(np.exp(np.log(N).mean())), float(np.exp(np.log(D).mean()))
    x, y = np.log(N / centre[0]), np.log(D / centre[1])
    means = np.bincount(of_rung, logs) / counts
    among = logs - means[of_rung]
    freedom = len(logs) - len(rungs)
    spread = math.sqrt(float(among @ among) / freedom) if freedom else 0.0
    starts = _starts(float(np.exp(logs).min()), float(np.exp(logs).mean()))
    found, cost = _minimize(starts, np.tile(logs, (len(starts), 1)), x, y, delta=math.inf)
    best = found[np.argmin(cost)]
    for _ in range(_ROUNDS):
        off = np.abs(logs - _log_loss(best[None], x, y)[0])
        delta = max(_HUBER, _HUBER_SPREADS * float(np.median(off)) / _MEDIAN)
        best = _minimize(best[None], logs[None], x, y, delta=delta)[0][0]
    off = means - np.bincount(of_rung, _log_loss(best[None], x, y)[0]) / counts
    variance = float(off @ off) / (len(rungs) - PARAMETERS)
    misfit = math.sqrt(max(0.0, variance - spread**2 * float((1 / counts).mean())))
    rng = np.random.default_rng(_SEED)
    pools = (
        _standardized(off - off.mean()),
        _standardized(among[counts[of_rung] > 1]) if freedom else np.zeros(1),
    )
    # How large both deviations are is itself known from few rungs and seeds only: Student's t.
    degrees = (len(rungs) - PARAMETERS, max(freedom, 1))
    unsure = [np.sqrt(n / rng.chisquare(n, (samples, 1))) for n in degrees]
    new = misfit * unsure[0] * rng.choice(pools[0], (samples, len(rungs) + 1))
    noise = spread * unsure[1] * rng.choice(pools[1], (samples, len(logs) + _NEW_SEEDS))
    drawn = _log_loss(best[None], x, y) + new[:, of_rung] + noise[:, : len(logs)]
    theta, _ = _minimize(np.tile(best, (samples, 1)), drawn, x, y, delta=delta)
    of_new = (new[:, -1], noise[:, len(logs) :])
    seed_spread = spread if freedom else None
    law = _law_of(best, centre)
    return Fit(law, tuple(rungs), seed_spread, misfit, centre, theta, *of_new)


def _standardized(errors: Array) -> Array:
    size = math.sqrt(float(np.mean(errors**2)))
    return errors / size if size > 1e-12 else np.zeros(1)


def _law_of(theta: Array, centre: tuple[float, float]) -> Law:
    E, A, B, alpha, beta = np.exp(theta).tolist()
    return Law(E, A * centre[0] ** alpha, B * centre[1] ** beta, alpha, beta)


def _starts(smallest: float, mean: float) -> Array:
    """Return (starts, 5): all combinations of exponents, of E's share and of how the other two terms divide."""
    rows = []
    for alpha, beta in itertools.product((0.15, 0.4, 1.0), repeat=2):
        for share, part in itertools.product((0.2, 0.5, 0.8), (0.3, 0.7)):
            E = share * smallest
            rows.append((E, part * (mean - E), (1 - part) * (mean - E), alpha, beta))
    return np.log(rows)


def _log_loss(theta: Array, x: Array, y: Array) -> Array:
    """Return log L, (laws, runs), of laws (laws, 5) at log parameters and log tokens around their centre."""
    E, A, B, alpha, beta = np.exp(theta).T[:, :, None]
    return np.log(E + A * np.exp(-alpha * x) + B * np.exp(-beta * y))


def _minimize(
    theta: Array, targets: Array, x: Array, y: Array, *, delta: float
) -> tuple[Array, Array]:
    """Return (laws, 5) and the mean Huber loss (laws,): Levenberg and Marquardt's steps, each law with its damping."""
    low, high = np.full(theta.shape, np.log(_LEAST)), np.array([12.0] * 3 + [np.log(_MOST)] * 2)
    low[:, :3] = targets.min(1)[:, None] + _SHARE

    def cost_of(theta: Array, rows: Array) -> Array:
        off = np.abs(_log_loss(theta, x, y) - targets[rows])
        inner = np.minimum(off, delta)
        return (inner * (off - 0.5 * inner)).mean(1)

    theta, rows = np.clip(theta, low, high), np.arange(len(theta))  # rows: not converged yet
    cost, damping = cost_of(theta, rows), np.full(len(theta), 1e-2)
    for _ in range(_STEPS):
        now = theta[rows]
        terms = np.exp(now)[:, :, None]
        of_N, of_D = terms[:, 1] * np.exp(-terms[:, 3] * x), terms[:, 2] * np.exp(-terms[:, 4] * y)
        whole = terms[:, 0] + of_N + of_D
        slopes = np.stack(
            [
                np.broadcast_to(terms[:, 0], whole.shape),
                *(of_N, of_D, -of_N * terms[:, 3] * x, -of_D * terms[:, 4] * y),
            ],
            1,
        )
        slopes = slopes / whole[:, None]
        off = np.log(whole) - targets[rows]
        weight = np.minimum(1.0, delta / np.maximum(np.abs(off), 1e-300))
        gradient = np.einsum("rpn,rn->rp", slopes, weight * off)
        curvature = np.einsum("rpn,rn,rqn->rpq", slopes, weight, slopes)
        scale = np.einsum("rpp->rp", curvature)
        extra = damping[rows, None] * (scale + 1e-3 * scale.max(1, keepdims=True)) + 1e-12
        step = np.linalg.solve(curvature + extra[:, None] * np.eye(PARAMETERS), gradient[..., None])
        tried = np.clip(now - step[..., 0], low[rows], high)
        reached = cost_of(tried, rows)
        better = reached < cost[rows]
        gain = np.where(better, cost[rows] - reached, math.inf)
        theta[rows[better]], cost[rows[better]] = tried[better], reached[better]
        damping[rows] = np.clip(damping[rows] * np.where(better, 0.3, 5.0), 1e-9, 1e9)
        done = (gain < 1e-6 * cost[rows] + 1e-15) | (damping[rows] >= 1e9)
        rows = rows[~done]
        if not len(rows):
            break
    return theta, cost
