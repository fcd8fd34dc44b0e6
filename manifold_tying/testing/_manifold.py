"""The contract of a manifold."""

import math
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

import geoopt
import numpy as np
import scipy.stats
import torch
from hypothesis import strategies as st
from torch import Tensor

from manifold_tying.testing._assertions import assert_gradient
from manifold_tying.testing._laws import Draw, Law, NotApplicable, check
from manifold_tying.testing._manifold_subject import Subject, assert_on_manifold, assert_tangent, close, require_near
from manifold_tying.testing._strategies import BATCHES, SEEDS, ambient, points, random_point


def _projection_lands(subject: Subject, draw: Draw) -> None:
    x, v = subject.draw(draw)
    assert_on_manifold(subject.manifold, subject.projected(x + draw(st.sampled_from([0.1, 1e-6, 0.5]), "factor") * v))


def _projection_keeps(subject: Subject, draw: Draw) -> None:
    x, v = subject.draw(draw)
    y = subject.projected(x + 0.3 * v)
    close(subject.manifold.projx(x), x, "projx(x) - x")
    close(subject.manifold.projx(y), y, "projx(projx(y)) - projx(y)")


def _projection_is_nearest(subject: Subject, draw: Draw) -> None:
    x, v = subject.draw(draw)
    outside = x + 0.1 * v
    nearest = subject.projected(outside)

    def distance(y: Tensor) -> Tensor:
        return (outside - y).square().sum(subject.event()).sqrt()

    tangents = [subject.tangent(draw, nearest, size) for size in (0.3, 1e-2)]
    downhill = subject.manifold.proju(nearest, outside - nearest)
    others = [x, *(subject.manifold.retr(nearest, u) for u in (*tangents, downhill / 2))]
    for other in others:
        excess = (distance(nearest) - distance(other)).max().item()
        if excess > 1e-7:  # the distance is flat near its minimum
            raise AssertionError(f"another point of the manifold is nearer by {excess:.3g} than projx(y)")


def _vectors_are_tangent(subject: Subject, draw: Draw) -> None:
    x, v = subject.draw(draw)
    u = subject.manifold.proju(x, v)
    assert_tangent(subject.manifold, x, u)
    assert_tangent(subject.manifold, x, subject.manifold.egrad2rgrad(x, v))
    close(subject.manifold.proju(x, u), u, "proju(x, u) - u for a tangent u")


def _tangent_space_is_whole(subject: Subject, draw: Draw) -> None:
    """The derivatives of projx at x are the tangent vectors, whatever proju says."""
    x, v = subject.draw(draw)
    h = 1e-5
    u = (subject.projected(x + h * v) - subject.projected(x - h * v)) / (2 * h)
    require_near(subject.manifold.proju(x, u), u, 1e-5, "proju(x, u) - u for a derivative u of projx at x")


def _projection_is_orthogonal(subject: Subject, draw: Draw) -> None:
    x, v = subject.draw(draw)
    u = subject.tangent(draw, x)
    product = subject.inner(x, v - subject.manifold.proju(x, v), u)
    close(product, torch.zeros_like(product), "<v - proju(x, v), u>", subject.metric_condition(x))


def _gradient_is_for_the_metric(subject: Subject, draw: Draw) -> None:
    x, v = subject.draw(draw)
    u = subject.tangent(draw, x)
    product = subject.inner(x, subject.manifold.egrad2rgrad(x, v), u)
    close(product, (v * u).sum(subject.event()), "<egrad2rgrad(x, v), u>_x - tr vᵀu", subject.metric_condition(x))


def _inner_is_a_metric(subject: Subject, draw: Draw) -> None:
    x, _ = subject.draw(draw)
    u, v, w = (subject.tangent(draw, x) for _ in range(3))
    product, condition = subject.inner, subject.metric_condition(x)
    close(product(x, u, v), product(x, v, u), "<u, v> - <v, u>", condition)
    separate = product(x, u, v) + 2 * product(x, w, v)
    close(product(x, u + 2 * w, v), separate, "<u + 2w, v> - <u, v> - 2<w, v>", condition)
    close(product(x, u), product(x, u, u), "<u> - <u, u>", condition)
    lengths, moved = product(x, u), u.abs().amax(subject.event()) > 1e-6
    if (lengths[moved] <= 0).any() or (lengths < -1e-12).any():
        raise AssertionError(f"<u, u> is {lengths.min().item():.3g} for a tangent u that is not 0")


def _batch_is_its_elements(subject: Subject, draw: Draw) -> None:
    x = draw(points(subject.manifold, (3, *subject.shape), device=subject.device), "points")
    v = draw(ambient((3, *subject.shape), device=subject.device), "ambient vectors")
    u = subject.manifold.proju(x, v)
    maps: dict[str, Callable[..., Tensor]] = {
        "projx": lambda x, u, v: subject.projected(x + 0.01 * v),
        "proju": lambda x, u, v: subject.manifold.proju(x, v),
        "egrad2rgrad": lambda x, u, v: subject.manifold.egrad2rgrad(x, v),
        "retr": lambda x, u, v: subject.manifold.retr(x, 0.3 * u),
        "inner": lambda x, u, v: subject.inner(x, u, u),
    }
    for name, function in maps.items():
        together, alone = function(x, u, v), torch.stack([function(*one) for one in zip(x, u, v, strict=True)])
        close(together, alone, f"{name} of a batch, minus that of its elements")


def _dtype_and_device_stay(subject: Subject, draw: Draw) -> None:
    for dtype in (torch.float64, torch.float32):
        x, v = subject.draw(draw, dtype)
        u = subject.manifold.proju(x, v)
        y = subject.manifold.retr(x, 0.3 * u)
        results = {
            "random": x, "proju": u, "retr": y, "projx": subject.manifold.projx(x),
            "egrad2rgrad": subject.manifold.egrad2rgrad(x, v), "inner": subject.manifold.inner(x, u),
        }  # fmt: skip
        with suppress(NotImplementedError):
            results["transp"] = subject.manifold.transp(x, y, u)
        for name, result in results.items():
            if (result.dtype, result.device.type) != (dtype, v.device.type):
                raise AssertionError(f"{name} of {dtype} on {v.device} is {result.dtype} on {result.device}")
        assert_on_manifold(subject.manifold, y)


def _checks_see_what_is_off(subject: Subject, draw: Draw) -> None:
    x, v = subject.draw(draw)
    if subject.manifold.check_point_on_manifold(x * math.nan):
        raise AssertionError("check_point_on_manifold accepts NaN")
    normal = v - subject.manifold.proju(x, v)
    size = normal.norm()
    if size < 1e-3 * v.norm():  # every vector is tangent to an open set
        return
    if subject.manifold.check_vector_on_tangent(x, v):
        raise AssertionError("check_vector_on_tangent accepts a vector with a normal part")
    if subject.manifold.check_point_on_manifold(x + normal / size):
        raise AssertionError("check_point_on_manifold accepts x + n with a normal n of length 1")


def _random_points_are_points(subject: Subject, draw: Draw) -> None:
    shape = (*draw(st.sampled_from(BATCHES), "batch shape"), *subject.shape)
    x = subject.implemented("random")(*shape, dtype=torch.float64, device=subject.device)
    if tuple(x.shape) != shape:
        raise AssertionError(f"random{shape} has the shape {tuple(x.shape)}")
    assert_on_manifold(subject.manifold, x.detach().as_subclass(Tensor))
    again = subject.manifold.random(*shape, dtype=torch.float64, device=subject.device)
    if math.prod(subject.shape) > 1 and torch.equal(x, again):
        raise AssertionError("random gives the same point twice")


def _random_points_are_uniform(subject: Subject, draw: Draw) -> None:
    """X and QX have the same distribution for orthogonal Q: two-sample Kolmogorov-Smirnov tests with p > 1e-12.

    A thorough run makes tens of thousands of these tests, so a larger bound gives false alarms.
    """
    if not subject.uniform:
        raise NotApplicable
    n = subject.shape[-2] if len(subject.shape) > 1 else subject.shape[-1]
    x = random_point(subject.manifold, (4000, *subject.shape), draw(SEEDS, "seed"), torch.float64, subject.device)
    Q = torch.linalg.qr(draw(ambient((n, n), device=subject.device), "ambient matrix"))[0]
    X = x.view(len(x), n, -1)
    turned = Q @ X
    for i in range(X.shape[-1]):
        for j in range(i + 1):
            ours, theirs = (a[:, 0, i] + 0.6 * a[:, -1, j] for a in (X, turned))  # generic: no atoms
            p = scipy.stats.ks_2samp(ours.cpu().numpy(), theirs.cpu().numpy()).pvalue
            if p < 1e-12:
                raise AssertionError(f"X and QX have different distributions for an orthogonal Q (p = {p:.1g})")


def _retraction_lands(subject: Subject, draw: Draw) -> None:
    x, _ = subject.draw(draw)
    u = draw(st.sampled_from([1.0, 0.0, 1e-9, 0.1, 3.0, 1e4]), "length") * subject.unit_vector(draw, x)
    assert_on_manifold(subject.manifold, subject.manifold.retr(x, u))


def _retraction_starts_at_the_point(subject: Subject, draw: Draw) -> None:
    x, _ = subject.draw(draw)
    close(subject.manifold.retr(x, torch.zeros_like(x)), x, "retr(x, 0) - x")


def _moves_along(name: str, subject: Subject, draw: Draw) -> None:
    x, _ = subject.draw(draw)
    u, h, move = subject.unit_vector(draw, x), 1e-4, subject.implemented(name)
    difference = (move(x, h * u) - move(x, -h * u)) / (2 * h)
    require_near(difference, u, 1e-5, f"the derivative of {name}(x, t u) at t = 0, minus u,")


def _retraction_has_a_gradient(subject: Subject, draw: Draw) -> None:
    batch = draw(st.sampled_from([(), (2,)]), "batch shape")  # the Jacobian's time grows with its square
    x = draw(points(subject.manifold, (*batch, *subject.shape), device=subject.device), "point")
    u = draw(st.sampled_from([0.0, 0.3]), "length") * subject.unit_vector(draw, x)
    assert_gradient(partial(subject.manifold.retr, x, leaf := u.clone().requires_grad_()), [leaf])


def _retraction_has_its_order(subject: Subject, draw: Draw) -> None:
    expmap = subject.implemented("expmap")
    x, _ = subject.draw(draw)
    u = subject.unit_vector(draw, x)
    times = np.logspace(-2.5, -1.5, 5)
    errors = [(subject.manifold.retr(x, t * u) - expmap(x, t * u)).abs().max().item() for t in times]
    if max(errors) < 1e-12:
        return
    slope = float(np.polyfit(np.log(times), np.log(np.maximum(errors, 1e-300)), 1)[0])
    if slope < subject.order + 0.9:  # 0.1 covers higher-order terms at t = 0.03
        raise AssertionError(
            f"retr(x, t u) deviates from the geodesic like t^{slope:.2f}, expected t^{subject.order + 1} for a retraction of "
            f"order {subject.order}"
        )


def _logarithm_inverts(subject: Subject, draw: Draw) -> None:
    logmap, expmap = subject.implemented("logmap"), subject.implemented("expmap")
    x, _ = subject.draw(draw)
    u = 0.5 * subject.unit_vector(draw, x)
    require_near(logmap(x, expmap(x, u)), u, 1e-6, "logmap(x, expmap(x, u)) - u")


def _transport_is_tangent(subject: Subject, draw: Draw) -> None:
    x, y, u = _transported(subject, draw)
    assert_tangent(subject.manifold, y, subject.implemented("transp")(x, y, u))


def _transport_is_linear(subject: Subject, draw: Draw) -> None:
    x, y, u = _transported(subject, draw)
    w, transp = subject.tangent(draw, x), subject.implemented("transp")
    close(transp(x, y, u + 2 * w), transp(x, y, u) + 2 * transp(x, y, w), "transp(u + 2w) - transp(u) - 2 transp(w)")


def _transport_in_place_is_nothing(subject: Subject, draw: Draw) -> None:
    x, _ = subject.draw(draw)
    u = subject.tangent(draw, x)
    close(subject.implemented("transp")(x, x, u), u, "transp(x, x, u) - u", subject.metric_condition(x))


def _transported(subject: Subject, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    x, _ = subject.draw(draw)
    return x, subject.manifold.retr(x, 0.7 * subject.unit_vector(draw, x)), subject.tangent(draw, x)


MANIFOLD_LAWS: tuple[Law[Subject], ...] = (
    Law("the checks reject what is off the manifold", _checks_see_what_is_off),
    Law("random points are on the manifold", _random_points_are_points),
    Law("random points are uniform", _random_points_are_uniform),
    Law("projx lands on the manifold", _projection_lands),
    Law("projx is idempotent", _projection_keeps),
    Law("projx is the nearest point", _projection_is_nearest),
    Law("proju and egrad2rgrad give tangent vectors", _vectors_are_tangent),
    Law("proju keeps all tangent vectors", _tangent_space_is_whole),
    Law("proju is orthogonal", _projection_is_orthogonal),
    Law("egrad2rgrad is the gradient for the metric", _gradient_is_for_the_metric),
    Law("inner is a metric", _inner_is_a_metric),
    Law("retr lands on the manifold", _retraction_lands),
    Law("retr(x, 0) is x", _retraction_starts_at_the_point),
    Law("retr moves along the vector", partial(_moves_along, "retr")),
    Law("retr has its order", _retraction_has_its_order),
    Law("retr has a gradient", _retraction_has_a_gradient),
    Law("expmap moves along the vector", partial(_moves_along, "expmap")),
    Law("logmap inverts expmap", _logarithm_inverts),
    Law("transp gives tangent vectors", _transport_is_tangent),
    Law("transp is linear", _transport_is_linear),
    Law("transp from a point to itself keeps the vector", _transport_in_place_is_nothing),
    Law("a batch equals its elements", _batch_is_its_elements),
    Law("dtype and device are preserved", _dtype_and_device_stay),
)


def check_manifold(
    manifold: geoopt.Manifold,
    shape: tuple[int, ...],
    *,
    order: int = 1,
    uniform: bool = False,
    device: torch.types.Device = None,
    skip: Collection[str] = (),
) -> None:
    """Check every law of ``MANIFOLD_LAWS`` on random points, single and batched.

    Args:
        manifold: a ``geoopt.Manifold``.
        shape: shape of one point.
        order: order of the retraction: retr(x, t u) is within O(t^(order + 1)) of the geodesic. Ignored without an expmap.
        uniform: claim that the distribution of random points is invariant under rotations, x -> Qx.
        device: device of the points.
        skip: names of laws to leave out.

    Raises:
        BrokenLaws: names each broken law and the smallest example.
        ValueError: a name in ``skip`` is not a law, or no point has that shape.

    >>> check_manifold(Stiefel("polar"), (5, 2), order=2, uniform=True)
    """
    __tracebackhide__ = True
    ok, reason = manifold.check_point(torch.empty(shape), explain=True)
    if ok and manifold.ndim not in (0, len(shape)):
        ok, reason = False, f"its points have ndim {manifold.ndim}, so that is a batch of them"
    if not ok:
        raise ValueError(f"expected the shape of a point of {manifold}, got {shape}: {reason}")
    check(MANIFOLD_LAWS, Subject(manifold, shape, order, uniform, device), f"{manifold} at {shape}", skip)
