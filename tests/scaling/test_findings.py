"""Everything the paper reports from one call, and as tables of text."""

import pytest

import scaling
from scaling.reports.findings import Findings, findings
from scaling.reports.findings_tables import NONE, sections


@pytest.fixture(scope="module")
def found(paper_analysis):
    return findings(paper_analysis.fit, n_starts=40)


@pytest.fixture(scope="module")
def tables(found):
    return {section.title: section for section in sections(found)}


def cells(tables, beginning):
    (section,) = (one for title, one in tables.items() if title.startswith(beginning))
    return {row[0]: row for row in section.rows}, section


def test_the_papers_tables_are_all_there(tables):
    assert len(tables) == 7
    for section in tables.values():
        assert {len(row) for row in section.rows} == {len(section.header)}


def test_published_numbers_stand_in_the_text(tables):
    """Numbers of the paper's runs under the regression split, to the digits printed."""
    own, _ = cells(tables, "Each architecture alone")
    assert own["r = 1, effective depth 20"][3] == "0.2513"  # published 0.251
    growth, _ = cells(tables, "Compute-optimal growth, each")
    row = growth["r = 4, effective depth 20"]
    assert row[1:3] == ("0.668", "0.433") and row[4:6] == ("0.757", "0.371")
    parts, _ = cells(tables, "Joint law on parts")
    assert parts["C ≤ 2.15e+18"][2] == "0.4438" and parts["C ≥ 4.64e+18"][2] == "0.4916"
    assert parts["4 lowest budgets, C ≤ 4.64e+18"][2] == "0.4535"
    assert [parts[f"without r = {r}"][2][:5] for r in (1, 2, 4, 8)] == [
        "0.480",
        "0.453",
        "0.445",
        "0.502",
    ]  # 0.4801, 0.4537, 0.4451, 0.5028
    sizes, _ = cells(tables, "As wide as an unlooped model of 1 B")
    assert sizes["r = 4, effective depth 20"][2:4] == ("0.408 B", "0.584 B")


def test_every_gap_of_the_paper_is_printed_with_its_range(tables):
    _, section = cells(tables, "Gap to r = 1")
    assert len(section.rows) == 9 and section.note == ""
    ranges = {row[:2]: row[-1] for row in section.rows}
    assert ranges["minima of the cells' parabolas", "r = 8, effective depth 20"] == "[0.093, 0.124]"


def test_the_largest_budget_is_predicted_from_the_five_others(found, tables):
    rows, section = cells(tables, "Largest budget predicted")
    assert found.held_out.n_held_out == 16 and found.held_out.n_fitted == 100
    assert rows["all"][4] == f"{found.held_out.rmse:.4f}"
    assert section.note.startswith("Fitted to the other 100 runs: φ = 0.4")


def test_a_little_grid_leaves_out_what_it_cannot_say(make_grid, known_law):
    """Two budgets, no FLOPs, no unlooped runs: reasons and dashes, no numbers."""
    budgets, widths = (1e14, 4e14), (48, 64, 96, 128)
    grid = make_grid(known_law, budgets=budgets, widths=widths, rs=(2, 4), noise=0.002)
    found = findings(scaling.fit_joint(grid.drop(columns="train_flops_per_token"), n_starts=20))
    for part in (*found.halves, found.held_out):
        assert part.fit is None and "one compute budget" in part.reason
    assert found.lowest is None
    assert found.sizes == () and found.depths == ()
    text = {section.title: section for section in sections(found)}
    gaps, section = cells(text, "Gap to r = 1")
    assert {row[-1] for row in section.rows} == {NONE} and "Without a gap: r = " in section.note
    growth, _ = cells(text, "Compute-optimal growth, joint")
    assert growth["r = 2"][1:-1] == (NONE,) * 7
    assert growth["r = 2"][-1] == "column train_flops_per_token is missing"
    parts, _ = cells(text, "Joint law on parts")
    assert "two different r" in parts["without r = 2"][-1]


def test_findings_come_back_from_their_json(found):
    again = Findings.from_json(found.to_json())
    assert again.gaps == found.gaps and again.exponents_own == found.exponents_own
    assert again.own[2].fit.law == found.own[2].fit.law and again.sizes == found.sizes
