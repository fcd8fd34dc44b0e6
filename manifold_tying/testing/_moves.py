"""Laws of the maps that move points and vectors: retractions, geodesics and transport."""

from functools import partial

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from manifold_tying.testing._assertions import assert_gradient
from manifold_tying.testing._laws import Draw, Law
from manifold_tying.testing._manifold_subject import (
    Subject,
    assert_on_manifold,
    assert_tangent,
    close,
    implemented,
    require_near,
)

LENGTHS = (1.0, 0.0, 1e-9, 0.1, 3.0, 1e4)  # of tangent vectors passed to retr


def _retraction_lands(subject: Subject, draw: Draw) -> None:
    x, _ = subject.draw(draw)
    u = draw(st.sampled_from(LENGTHS), "length") * subject.unit_vector(draw, x)
    assert_on_manifold(subject.manifold, subject.manifold.retr(x, u))


def _retraction_starts_at_the_point(subject: Subject, draw: Draw) -> None:
    x, _ = subject.draw(draw)
    close(subject.manifold.retr(x, torch.zeros_like(x)), x, "retr(x, 0) - x")


def _moves_along(name: str, subject: Subject, draw: Draw) -> None:
    x, _ = subject.draw(draw)
    u, h, move = subject.unit_vector(draw, x), 1e-4, implemented(getattr(subject.manifold, name))
    difference = (move(x, h * u) - move(x, -h * u)) / (2 * h)
    require_near(difference, u, 1e-5, f"the derivative of {name}(x, t u) at t = 0, minus u,")


def _retraction_has_a_gradient(subject: Subject, draw: Draw) -> None:
    x, v = subject.draw(draw)
    u = draw(st.sampled_from([0.0, 0.3]), "length") * subject.unit_vector(draw, x)
    leaf = u.clone().requires_grad_()
    assert_gradient(lambda: subject.manifold.retr(x, leaf), [leaf], [subject.unit_vector(draw, x)], v)


def _retraction_has_its_order(subject: Subject, draw: Draw) -> None:
    expmap = implemented(subject.manifold.expmap)
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
    logmap, expmap = implemented(subject.manifold.logmap), implemented(subject.manifold.expmap)
    x, _ = subject.draw(draw)
    u = 0.5 * subject.unit_vector(draw, x)
    require_near(logmap(x, expmap(x, u)), u, 1e-6, "logmap(x, expmap(x, u)) - u")


def _transport_is_tangent(subject: Subject, draw: Draw) -> None:
    x, y, u = _transported(subject, draw)
    assert_tangent(subject.manifold, y, implemented(subject.manifold.transp)(x, y, u))


def _transport_is_linear(subject: Subject, draw: Draw) -> None:
    x, y, u = _transported(subject, draw)
    w, transp = subject.tangent(draw, x), implemented(subject.manifold.transp)
    close(transp(x, y, u + 2 * w), transp(x, y, u) + 2 * transp(x, y, w), "transp(u + 2w) - transp(u) - 2 transp(w)")


def _transport_in_place_is_nothing(subject: Subject, draw: Draw) -> None:
    x, _ = subject.draw(draw)
    u = subject.tangent(draw, x)
    close(implemented(subject.manifold.transp)(x, x, u), u, "transp(x, x, u) - u", subject.metric_condition(x))


def _transported(subject: Subject, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    x, _ = subject.draw(draw)
    return x, subject.manifold.retr(x, 0.7 * subject.unit_vector(draw, x)), subject.tangent(draw, x)


MOVE_LAWS: tuple[Law[Subject], ...] = (
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
)
