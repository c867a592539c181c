import numpy as np
import pytest
import torch

from vlm_rewards import heads, losses, metrics


def unit(*shape):
    return torch.nn.functional.normalize(
        torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))), dim=-1
    )


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_goal_baseline_equals_the_matrix_formula(alpha):
    x, goal, baseline = unit(7, 16), unit(3, 16).mean(0), unit(2, 16).mean(0)
    d = goal - baseline
    projection = alpha * torch.outer(d, d) / (d @ d) + (1 - alpha) * torch.eye(16)
    expected = 1 - 0.5 * ((x - goal) @ projection).square().sum(-1)
    assert torch.allclose(heads.goal_baseline(x, goal, baseline, alpha), expected, atol=1e-6)


def test_goal_baseline_without_regularisation_is_the_cosine():
    x, goal, baseline = unit(5, 8), unit(8), unit(1, 8)[0]
    assert torch.allclose(heads.goal_baseline(x, goal, baseline, 0.0), x @ goal, atol=1e-6)


def test_softmax_over_negatives_by_hand():
    # logits 1, 0, 0 at temperature 1: e / (e + 2)
    p = heads.softmax_probability(torch.tensor([0.5]), torch.tensor([[0.0, 0.0]]), temperature=0.5)
    assert p.item() == pytest.approx(np.e / (np.e + 2))


def test_gated_by_hand():
    cosine, probability = torch.tensor([0.0, 0.5, 0.9, 0.9]), torch.tensor([0.0, 0.2, 0.59, 0.6])
    r = heads.gated(cosine, probability, low=0.1, high=0.9, threshold=0.6, dense_scale=0.5, gate_scale=1.0)
    assert r.tolist() == pytest.approx([0.0, 0.25, 0.5, 1.5])  # below low clips to 0; the gate includes its threshold


def test_contrastive_ignores_borderline_and_other_positives():
    logits = torch.tensor([[0.0, 5.0, 9.0]])
    truth = torch.tensor([[1, 1, -1]], dtype=torch.int8)
    assert losses._one_way(logits, truth).item() == pytest.approx(0.0, abs=1e-4)  # nothing false to compete with
    truth = torch.tensor([[1, -1, 0]], dtype=torch.int8)
    assert losses._one_way(logits, truth).item() == pytest.approx(np.log1p(np.exp(9.0)), abs=1e-4)


def test_rank_pairs_by_hand():
    nan = float("nan")
    a, b = torch.tensor([0.2, 0.2, 0.2]), torch.tensor([0.1, 0.1, 0.9])
    progress_a, progress_b = torch.tensor([0.9, 0.5, nan]), torch.tensor([0.1, 0.45, 0.0])
    # only the first pair speaks: softplus(-15 * 0.1)
    assert losses.rank_pairs(a, b, progress_a, progress_b).item() == pytest.approx(np.log1p(np.exp(-1.5)), abs=1e-6)


def test_metrics_by_hand():
    score = np.array([0.1, 0.4, 0.35, 0.8])
    label = np.array([False, False, True, True])
    assert metrics.auroc(score, label) == pytest.approx(0.75)  # 3 of 4 pairs in order
    assert metrics.auroc(np.zeros(4), label) == pytest.approx(0.5)  # ties count half
    assert np.isnan(metrics.auroc(score, np.ones(4, bool)))
    assert metrics.threshold_at_recall(score, label, 0.95) == pytest.approx(0.35)
    assert metrics.false_positive_rate(score, ~label, 0.35) == pytest.approx(0.5)
    assert metrics.spearman(np.array([1.0, 2, 3]), np.array([10.0, 30, 20])) == pytest.approx(0.5)
    assert np.isnan(metrics.spearman(np.ones(3), np.arange(3.0)))
