"""The contract of an optimizer on a manifold."""

import copy
import io
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import geoopt
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import Optimizer

from manifold_tying.testing._assertions import assert_close, assert_equal
from manifold_tying.testing._laws import Draw, Law, NotApplicable, check
from manifold_tying.testing._manifold_subject import CHAIN, assert_on_manifold
from manifold_tying.testing._strategies import SEEDS, ambient, random_point, unit

Make = Callable[[list[geoopt.ManifoldParameter]], Optimizer]
SIZES = (1.0, 0.0, 1e-3, 3.0)  # scales of gradients
HUGE = 5e154
SEVERAL_STEPS = 10 * CHAIN  # their error growth
STEPS = 100  # for the problem with a known optimum


@dataclass(frozen=True)
class Subject:
    """The optimizer's factory, the manifold and the shape of a point."""

    make: Make
    manifold: geoopt.Manifold
    shape: tuple[int, ...]

    def start(self, seed: int, count: int = 1) -> tuple[list[geoopt.ManifoldParameter], Optimizer]:
        """Random points for a seed, and their optimizer."""
        return self.over([random_point(self.manifold, self.shape, seed + i, torch.float64, None) for i in range(count)])

    def over(self, found: Sequence[Tensor]) -> tuple[list[geoopt.ManifoldParameter], Optimizer]:
        params = [geoopt.ManifoldParameter(x.clone(), manifold=self.manifold) for x in found]
        return params, self.make(params)

    def gradients(self, draw: Draw, count: int = 1) -> list[Tensor]:
        """2 to 6 gradients per parameter, some zero, tiny or large, each stacked as (steps, *shape)."""
        steps = draw(st.integers(2, 6), "steps")
        drawn = draw(st.lists(st.sampled_from(SIZES), min_size=steps, max_size=steps), "sizes of the gradients")
        sizes = torch.tensor(drawn, dtype=torch.float64).view(-1, *[1] * len(self.shape))
        return [draw(ambient((steps, *self.shape)), "gradients before scaling") * sizes for _ in range(count)]


def _drive(params: Sequence[Tensor], optimizer: Optimizer, gradients: Sequence[Tensor]) -> None:
    for step in range(len(gradients[0])):
        for p, g in zip(params, gradients, strict=True):
            p.grad = g[step].clone()
        optimizer.step()


def _points_stay_points(subject: Subject, draw: Draw) -> None:
    params, optimizer = subject.start(draw(SEEDS, "seed of the points"))
    for gradient in subject.gradients(draw)[0]:
        _drive(params, optimizer, [gradient[None]])
        assert_on_manifold(subject.manifold, _plain(params[0]))


def _huge_gradients(subject: Subject, draw: Draw) -> None:
    """The squares of the gradients, and so second moments, overflow."""
    params, optimizer = subject.start(draw(SEEDS, "seed of the points"))
    gradients = torch.stack([draw(ambient(subject.shape), "gradient") for _ in range(2)])
    gradients[0] *= HUGE / gradients[0].abs().max().clamp_min(1e-3)
    for gradient in gradients:
        _drive(params, optimizer, [gradient[None]])
        assert_on_manifold(subject.manifold, _plain(params[0]))


def _steps_move(subject: Subject, draw: Draw) -> None:
    params, optimizer = subject.start(draw(SEEDS, "seed of the points"))
    x = _plain(params[0])
    gradient = subject.manifold.proju(x, draw(ambient(subject.shape), "gradient"))
    if gradient.abs().max() < 1e-5:  # St(1, 1)
        raise NotApplicable
    _drive(params, optimizer, [gradient[None]])
    slope = float((subject.manifold.egrad2rgrad(x, gradient) * (_plain(params[0]) - x)).sum())
    if not slope < 0:
        raise AssertionError(f"a step goes uphill: the slope of the loss along it is {slope:.3g}")


def _saved_state_continues(subject: Subject, draw: Draw) -> None:
    params, optimizer = subject.start(draw(SEEDS, "seed of the points"), 2)
    gradients = subject.gradients(draw, 2)
    _drive(params, optimizer, gradients)
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    file.seek(0)
    others, resumed = subject.over([_plain(p) for p in params])
    resumed.load_state_dict(torch.load(file, weights_only=False))
    for state in (params, optimizer), (others, resumed):
        _drive(*state, gradients)
    assert_equal(map(_plain, others), map(_plain, params), "the points after resuming from a saved state")


def _copies_continue(subject: Subject, draw: Draw) -> None:
    params, optimizer = subject.start(draw(SEEDS, "seed of the points"))
    gradients = subject.gradients(draw)
    _drive(params, optimizer, gradients)
    twins, twin = copy.deepcopy((params, optimizer))
    _drive(params, optimizer, gradients)
    _drive(twins, twin, gradients)
    assert_equal(map(_plain, twins), map(_plain, params), "the points of a deep copy that resumed")


def _converges(subject: Subject, draw: Draw) -> None:
    """Minimize ‖x - y‖² over the manifold from a point near y, with a learning rate that falls to zero."""
    target = random_point(subject.manifold, subject.shape, draw(SEEDS, "seed of the points"), torch.float64, None)
    direction = draw(ambient(subject.shape), "direction of the start")
    u = unit(subject.manifold, target, subject.manifold.proju(target, direction))
    start = subject.manifold.retr(target, 0.2 * u)
    before = (start - target).norm()
    if before < 1e-6:  # St(1, 1)
        raise NotApplicable
    params, optimizer = subject.over([start])
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(STEPS):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 - step / STEPS)
        optimizer.zero_grad()
        (params[0] - target).square().sum().backward()
        optimizer.step()
    after = (_plain(params[0]) - target).norm()
    if not after < 0.1 * before:
        raise AssertionError(
            f"{STEPS} steps changed the distance to the optimum from {before:.3g} to {after:.3g}, expected a tenth; try "
            "another lr first"
        )


def _no_rate_no_move(subject: Subject, draw: Draw) -> None:
    params, optimizer = subject.start(draw(SEEDS, "seed of the points"))
    before = _plain(params[0])
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    _drive(params, optimizer, subject.gradients(draw))
    assert_close(_plain(params[0]), before, "a point after steps with lr=0", SEVERAL_STEPS)


def _no_gradient_no_move(subject: Subject, draw: Draw) -> None:
    params, optimizer = subject.start(draw(SEEDS, "seed of the points"), 2)
    before = _plain(params[1])
    params[0].grad = draw(ambient(subject.shape), "gradient")
    optimizer.step()
    assert_equal([_plain(params[1])], [before], "a point without a gradient, after a step")


def _maximize_mirrors(subject: Subject, draw: Draw) -> None:
    seed = draw(SEEDS, "seed of the points")
    x, down = subject.start(seed)
    if "maximize" not in down.param_groups[0]:
        raise NotApplicable
    y, up = subject.start(seed)
    for group in up.param_groups:
        group["maximize"] = True
    gradients = subject.gradients(draw)
    _drive(x, down, gradients)
    _drive(y, up, [-gradients[0]])
    assert_close(_plain(y[0]), _plain(x[0]), "maximize with -g, minus minimize with g", SEVERAL_STEPS)


def _together_is_one_by_one(subject: Subject, draw: Draw) -> None:
    seed, gradients = draw(SEEDS, "seed of the points"), subject.gradients(draw, 3)
    params, optimizer = subject.start(seed, 3)
    _drive(params, optimizer, gradients)
    for i, (p, gradient) in enumerate(zip(params, gradients, strict=True)):
        alone, own = subject.start(seed + i)
        _drive(alone, own, [gradient])
        assert_close(_plain(p), _plain(alone[0]), "a point that moved with two others, minus alone", SEVERAL_STEPS)


def _closures_are_run(subject: Subject, draw: Draw) -> None:
    seed, gradient = draw(SEEDS, "seed of the points"), draw(ambient(subject.shape), "gradient")
    params, optimizer = subject.start(seed)
    others, other = subject.start(seed)

    def closure() -> float:
        others[0].grad = gradient.clone()
        return 7.0

    _drive(params, optimizer, [gradient[None]])
    if other.step(closure) != 7.0:
        raise AssertionError("step(closure) does not return the closure's loss")
    assert_equal(map(_plain, others), map(_plain, params), "the point after step(closure), minus that after step()")


def _added_groups_move(subject: Subject, draw: Draw) -> None:
    params, _ = subject.start(draw(SEEDS, "seed of the points"), 2)
    optimizer = subject.make(params[:1])
    optimizer.add_param_group({"params": params[1:]})
    before = _plain(params[1])
    gradient = subject.manifold.proju(before, draw(ambient(subject.shape), "gradient"))
    if gradient.abs().max() < 1e-5:  # St(1, 1)
        raise NotApplicable
    _drive(params, optimizer, [torch.zeros_like(gradient)[None], gradient[None]])
    if torch.equal(_plain(params[1]), before):
        raise AssertionError("a point of a group that was added does not move")


def _gradients_are_left(subject: Subject, draw: Draw) -> None:
    params, optimizer = subject.start(draw(SEEDS, "seed of the points"))
    for gradient in subject.gradients(draw)[0]:
        params[0].grad = gradient.clone()
        optimizer.step()
        assert_equal([params[0].grad], [gradient], "p.grad after a step")


def _plain(p: Tensor) -> Tensor:
    return p.detach().clone().as_subclass(Tensor)


OPTIMIZER_LAWS: tuple[Law[Subject], ...] = (
    Law("points stay on the manifold", _points_stay_points),
    Law("huge gradients leave points on the manifold", _huge_gradients),
    Law("a step goes downhill", _steps_move),
    Law("it converges to a known optimum", _converges),
    Law("lr=0 does not move a point", _no_rate_no_move),
    Law("points without a gradient do not move", _no_gradient_no_move),
    Law("maximize mirrors minimize", _maximize_mirrors),
    Law("points move independently", _together_is_one_by_one),
    Law("points of added groups move", _added_groups_move),
    Law("closures are run", _closures_are_run),
    Law("p.grad is not modified", _gradients_are_left),
    Law("a saved state resumes bit for bit", _saved_state_continues),
    Law("deep copies resume bit for bit", _copies_continue),
)


def check_optimizer(
    make: Make, manifold: geoopt.Manifold, shape: tuple[int, ...] | None = None, *, skip: Collection[str] = ()
) -> None:
    """Check every law of ``OPTIMIZER_LAWS`` for an optimizer of float64 points.

    Args:
        make: builds the optimizer from a list of ``geoopt.ManifoldParameter``. In 100 steps, with its learning rate falling
            to zero, it has to reduce a distance of 0.2 from the minimum of ‖x - y‖² tenfold. lr=0.05 usually does.
        manifold: manifold of the points.
        shape: shape of a point; by default the first of (5,), (5, 2) and (4, 4) that the manifold accepts.
        skip: names of laws to leave out.

    Raises:
        BrokenLaws: names each broken law and the smallest example.
        ValueError: a name in ``skip`` is not a law; the manifold accepts none of the default shapes.

    >>> check_optimizer(lambda params: RiemannianAdam(params, lr=0.05), Stiefel())
    """
    __tracebackhide__ = True
    shapes: tuple[tuple[int, ...], ...] = ((5,),) if manifold.ndim == 1 else ((5, 2), (4, 4))
    fitting = [shape] if shape else [fits for fits in shapes if manifold.check_point(torch.empty(fits))]
    if not fitting:
        raise ValueError(f"{manifold} accepts none of the default shapes {shapes}; pass shape=")
    subject = Subject(make, manifold, fitting[0])
    check(OPTIMIZER_LAWS, subject, f"{type(subject.start(0)[1]).__name__} on {manifold} at {subject.shape}", skip)
