"""Figure of losses against test-time recurrences, with the saturating law of every run."""

import numpy as np
from matplotlib.figure import Figure

from ..fits.saturation import SaturationFit

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000")


def depth_figure(found: SaturationFit) -> Figure:
    """Loss against T of every run: points, its own law where there is one (line), the pooled one (dotted).

    A ring marks the mean recurrence in training, μ.
    """
    figure = Figure(figsize=(7.0, 4.6), layout="constrained")
    axis = figure.add_subplot()
    for place, curve in enumerate(found.curves):
        colour = _COLOURS[place % len(_COLOURS)]
        points = found.points[found.points["run_id"] == curve.run_id]
        times = points["test_recurrences"].to_numpy(dtype=float)
        axis.plot(times, points["loss"], "o", color=colour, markersize=4, label=curve.run_id)
        trained = points[points["test_recurrences"] == curve.mu]
        axis.plot(
            trained["test_recurrences"], trained["loss"], "o", color=colour, ms=10, mfc="none"
        )
        line = np.geomspace(times.min(), times.max(), 200)
        for law, style in ((curve.law, "-"), (curve.pooled, ":")):
            if law is not None:
                mu = np.full_like(line, curve.mu)
                axis.plot(line, law.loss(line, mu), style, color=colour, linewidth=1.2)
    axis.set_xscale("log", base=2)
    ticks = sorted(set(found.points["test_recurrences"]))
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.minorticks_off()
    axis.set_xlabel("recurrences at inference, T")
    axis.set_ylabel("loss, nats per token")
    axis.legend(fontsize=8)
    return figure
