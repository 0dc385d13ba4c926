import pytest
import torch
from sixbit_diffusion.reference.muon import COEFFICIENTS, Muon, orthogonalize


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 32, 96), (2, 96, 32)])
def test_singular_values_come_near_one(shape):
    torch.manual_seed(0)
    matrices = torch.randn(shape)
    result = orthogonalize(matrices)
    assert result.shape == shape and result.dtype == torch.float32
    values = torch.linalg.svdvals(result)
    assert values.median() > 0.7 and values.max() < 1.25
    assert torch.linalg.svdvals(matrices).amax(1).min() > 10  # they were not before
    u, _, vh = torch.linalg.svd(matrices, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(result.flatten(), (u @ vh).flatten(), 0) > 0.93


def test_scale_does_not_matter():
    torch.manual_seed(0)
    x = torch.randn(1, 16, 16)
    torch.testing.assert_close(orthogonalize(x * 1024), orthogonalize(x))
    assert orthogonalize(torch.zeros(1, 4, 4)).abs().max() == 0


def plain_steps(weights, grads, rate, mu=0.95, decay=0.01):
    """The docstring's formula, one matrix at a time, in float64."""
    a, b, c = COEFFICIENTS
    momentum = [torch.zeros_like(w) for w in weights]
    for step in grads:
        for i, g in enumerate(step):
            momentum[i] = mu * momentum[i] + (1 - mu) * g
            x = (1 - mu) * g + mu * momentum[i]
            x = x / x.norm()
            for _ in range(5):
                gram = x @ x.T
                x = a * x + b * gram @ x + c * gram @ gram @ x
            factor = 0.2 * max(x.shape) ** 0.5
            weights[i] = (1 - rate * decay) * weights[i] - rate * factor * x
    return weights


def test_steps_match_a_plain_loop_over_matrices():
    torch.manual_seed(0)
    shapes = [(8, 8), (8, 24), (8, 8), (24, 8)]  # equal shapes are updated together
    start = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    grads = [[torch.randn(shape, dtype=torch.float64) for shape in shapes] for _ in range(3)]
    parameters = [torch.nn.Parameter(w.float()) for w in start]
    optimizer = Muon(parameters, torch.tensor(0.05))
    for step in grads:
        for p, g in zip(parameters, step, strict=True):
            p.grad = g.float()
        optimizer.step()
    expected = plain_steps([w.clone() for w in start], grads, 0.05)
    for p, before, after in zip(parameters, start, expected, strict=True):
        moved, asked = p.double() - before, after - before
        assert (moved - asked).norm() < 0.1 * asked.norm()  # bfloat16 inside: measured 0.03 to 0.06


def test_it_lowers_a_quadratic():
    torch.manual_seed(0)
    target = torch.randn(16, 32)
    p = torch.nn.Parameter(torch.zeros(16, 32))
    optimizer = Muon([p], 0.2, weight_decay=0.0)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (p - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0] and losses[-1] < 0.1 * losses[0]


def test_a_tensor_rate_is_read_at_every_step():
    p, rate = torch.nn.Parameter(torch.ones(4, 4)), torch.tensor(0.0)
    optimizer = Muon([p], rate)
    p.grad = torch.eye(4)
    optimizer.step()
    assert (p == 1).all()
    rate.fill_(0.1)
    optimizer.step()
    assert (p.diag() < 1).all()
