"""Label consistency by hand."""

import pytest

from ablations.label_consistency import measure_consistency, score_table

PSEUDO = {"p1": "pos", "p2": "pos", "p3": "pos", "n1": "neg", "n2": "neg", "unused": "neg"}


def line(number, label, prediction, *texts):
    evidence = [{"text": text} for text in texts]
    return {"id": f"test-{number}", "label": label, "prediction": prediction, "evidence": evidence}


RUN = [
    line(0, "pos", "pos", "p1", "p2", "n1", "p3"),  # 3 of 4
    line(1, "pos", "neg", "n1", "n2", "p1", "n1"),  # 1 of 4
    line(2, "neg", "neg", "n1", "p1", "p2", "p3"),  # 1 of 4
    line(3, "pos", "pos", "p1", "p2", "p3", "p1"),  # 4 of 4
]


def measure(lines=RUN, name="pgra"):
    return measure_consistency(name, "sst2", lines, PSEUDO)


def texts_of(table):
    return [[cell.text for cell in row] for row in table.rows]


def test_score_lines_and_counts_by_hand():
    found = measure()
    assert found.shares.tolist() == [0.75, 0.25, 0.25, 1.0]
    assert (found.score, found.majority) == (2.25 / 4, 3 / 4)
    # 11 of the 16 pieces are pos, 3 of the 4 queries: 3/4 * 11/16 + 1/4 * 5/16
    assert found.chance == pytest.approx(38 / 64)
    assert (found.queries.tolist(), found.right.tolist()) == ([0, 2, 0, 1, 1], [0, 1, 0, 1, 1])

    turned = [{**one, "evidence": one["evidence"][::-1]} for one in RUN[::-1]]
    again = measure(turned)
    assert (again.score, again.interval, again.chance) == (
        found.score,
        found.interval,
        found.chance,
    )
    # Fewer evidence than others counts by its own number.
    found = measure([*RUN, line(4, "neg", "pos", "n1", "n2"), line(5, "neg", "pos")])
    assert found.shares.tolist()[4:] == [1.0]
    assert (found.queries[2], found.right[2]) == (1, 0)
    assert (len(found.shares), found.majority) == (5, 3 / 5)


def best(count):
    return [{**one, "evidence": one["evidence"][:count]} for one in RUN]


def test_a_table_shows_the_paper_and_the_difference_to_the_baseline():
    runs = [measure(best(1), name="fid"), measure(), measure(RUN[:3], name="few")]
    table = score_table(runs, baseline="fid", paper={("sst2", "pgra"): 75.2})
    fid, pgra, few = (dict(zip(table.columns, row, strict=True)) for row in texts_of(table))
    shown = [pgra[n] for n in ("consistency", "paper", "majority rate", "chance", "difference")]
    assert shown == ["56.2", "75.2", "75.0", "59.4", "-18.8"]
    assert (fid["paper"], fid["difference"], few["difference"]) == ("", "", "")  # other queries
