"""The figures hold the series they promise, with labels and units."""

import numpy as np
import pytest

import scaling
from scaling.reports.plots import frontier_figure, isoflops_figure, predicted_figure


@pytest.fixture(scope="module")
def small(make_grid, known_law):
    """Two budgets, three r and seeds, with noise that leaves some cells without a minimum."""
    return scaling.analyse(
        make_grid(known_law, budgets=(1e14, 4e14), seeds=2, noise=0.05), resamples=20
    )


def shown(figure):
    return [axis for axis in figure.axes if axis.get_visible()]


def texts(legend):
    return [text.get_text() for text in legend.get_texts()]


def test_isoflops_figure_has_a_panel_per_budget_with_points_curves_and_minima(paper_analysis):
    figure = isoflops_figure(paper_analysis)
    panels = shown(figure)
    assert len(panels) == 6
    for panel in panels:
        assert panel.get_xscale() == "log"
        assert panel.get_title().endswith("FLOPs")
        lines = panel.get_lines()
        assert sum(line.get_marker() == "*" for line in lines) == 4
        assert sum(line.get_linestyle() == "-" for line in lines) == 4
    assert panels[0].get_ylabel() == "Loss (nats per token)"
    assert panels[-1].get_xlabel().startswith("Parameters N")
    assert texts(figure.legends[0]) == ["r = 1", "r = 2", "r = 4", "r = 8", "parabola minimum"]


def test_cells_without_a_minimum_are_dotted_and_have_no_star(small):
    undetermined = [one for one in small.minima if one.reason]
    assert undetermined  # the noise is chosen so
    figure = isoflops_figure(small)
    lines = [line for panel in shown(figure) for line in panel.get_lines()]
    assert sum(line.get_linestyle() == ":" for line in lines) == len(undetermined)
    assert sum(line.get_marker() == "*" for line in lines) == len(small.minima) - len(undetermined)
    assert "minimum not determined" in texts(figure.legends[0])


def test_frontier_figure_has_solid_and_dashed_curves_for_every_r(paper_analysis):
    figure = frontier_figure(paper_analysis)
    left, right = shown(figure)
    styles = [line.get_linestyle() for line in left.get_lines()]
    assert styles.count("-") == 4 and styles.count("--") == 4
    assert left.get_xscale() == right.get_xscale() == "log"
    assert left.get_xlabel() == right.get_xlabel() == "Training compute C (FLOPs)"
    assert "refit with φ = 1" in texts(figure.legends[0])
    assert sum(line.get_linestyle() == "None" for line in left.get_lines()) == 24  # minima
    for line in left.get_lines():
        if line.get_linestyle() in ("-", "--"):
            assert np.all(np.diff(line.get_ydata()) < 0)  # more compute, less loss


def test_frontier_marks_cells_without_a_minimum_hollow_at_their_best_run(small):
    figure = frontier_figure(small)
    left, _ = shown(figure)
    points = [line for line in left.get_lines() if line.get_linestyle() == "None"]
    hollow = [line for line in points if line.get_markerfacecolor() == "none"]
    assert len(points) == len(small.minima)
    assert len(hollow) == sum(one.reason is not None for one in small.minima)
    assert "best run (no minimum)" in texts(figure.legends[0])


def test_predicted_figure_shows_every_run_and_the_diagonal(paper_analysis):
    left, right = shown(predicted_figure(paper_analysis))
    counts = [len(line.get_xdata()) for line in left.get_lines()]
    assert counts == [29, 29, 29, 29, 2]
    assert left.get_xlabel() == "Observed loss (nats per token)"
    assert right.get_ylabel() == "Observed − predicted (nats)"
    diagonal = left.get_lines()[-1]
    np.testing.assert_array_equal(diagonal.get_xdata(), diagonal.get_ydata())


def test_figures_without_budgets_or_flops_say_what_is_missing(make_grid, known_law):
    grid = make_grid(known_law, noise=0.005)
    bare = scaling.analyse(
        grid.drop(columns=["budget_flops", "hidden_size", "train_flops_per_token"])
    )
    assert "no budget_flops" in isoflops_figure(bare).axes[0].texts[0].get_text()
    assert "No frontier" in frontier_figure(bare).axes[0].texts[0].get_text()
    assert len(shown(predicted_figure(bare))) == 2
