import numpy as np

from pgra.core import Candidates
from pgra.retrieval.hybrid import fuse_by_rank


def ranking(*lines):
    rows = np.array(lines, dtype=np.int64)
    scores = np.where(rows < 0, -np.inf, -np.arange(rows.shape[1], dtype=np.float32))
    return Candidates(rows, scores.astype(np.float32))


def test_a_hand_worked_fusion():
    fused = fuse_by_rank([ranking([5, 2, 9]), ranking([2, 7, -1])], 4)
    # 2: 1/62 + 1/61; 5: 1/61; 7: 1/62; 9: 1/63.
    assert fused.rows.tolist() == [[2, 5, 7, 9]]
    expected = [1 / 62 + 1 / 61, 1 / 61, 1 / 62, 1 / 63]
    np.testing.assert_allclose(fused.scores[0], expected, rtol=1e-6)


def test_fusion_agrees_with_a_plain_loop():
    generator = np.random.default_rng(0)
    lines = [np.stack([generator.permutation(20)[:8] for _ in range(5)]) for _ in range(3)]
    fused = fuse_by_rank([ranking(*line) for line in lines], 6)
    for b in range(5):
        sums = {}
        for line in lines:
            for rank, row in enumerate(line[b].tolist(), start=1):
                sums[row] = sums.get(row, 0) + 1 / (60 + rank)
        best = sorted(sums, key=lambda row: (-np.float32(sums[row]), row))[:6]
        assert fused.rows[b].tolist() == best


def test_ties_go_by_row_whichever_ranking_held_them():
    one, other = ranking([8, 3]), ranking([3, 8])
    assert fuse_by_rank([one, other], 2).rows.tolist() == [[3, 8]]
    assert fuse_by_rank([other, one], 2).rows.tolist() == [[3, 8]]


def test_missing_entries_add_nothing():
    nothing = ranking([-1, -1, -1])
    fused = fuse_by_rank([ranking([4, 1, -1]), nothing], 3)
    assert fused.rows.tolist() == [[4, 1, -1]]
    assert fuse_by_rank([nothing, nothing], 2).rows.tolist() == [[-1, -1]]
