"""The page of an audit: what was checked, a figure, and what an audit can and cannot show."""

from pathlib import Path

import numpy as np
from scipy import stats

from dp_lightning.commands.audit_checks import FALSE_ALARM, Audit
from dp_lightning.commands.audit_runs import EXCLUDED
from dp_lightning.experiments.document import Document
from dp_lightning.experiments.figures import figure, style

_SHOWS = (
    "Noise that is too small or too large in a parameter, missing in one, reused in another step or parameter, "
    "or not normal. A contribution above the clipping bound, by the module's own loss or in one parameter alone. A "
    "claimed epsilon of these steps that is too small by about a factor of two; canaries cannot show smaller errors."
)
_SHOWS_NOT = (
    "The sampler: every example takes part in every step here (q = 1). The Poisson sampler, and the account of steps "
    "with q below 1, are tested separately in this project, and this page says nothing about them. The data: images "
    "are synthetic, so a fault that needs particular images can hide, and so can what the data set or the loader does. "
    "Whether somebody could guess the random numbers: only their distribution is tested. Post-processing: the audit "
    "looks at the privatized gradient before it, and anything computed from that alone costs no privacy. The lower "
    "bounds treat the scores of canaries as independent, which they are if the noise is. An audit that finds nothing "
    "is not a proof."
)


def page_of(audit: Audit, folder: Path) -> Document:
    """The page, its figure written to ``folder``."""
    plan, clip = audit.plan, audit.clip_plan.describe()
    page = Document(f"Audit: {audit.runs.names}", folder)
    failed = audit.failed
    page.say(f"{len(failed)} of {len(audit.checks)} checks FAILED." if failed else "All checks hold.")
    page.say(
        f"The private step of this configuration, {clip['kind']} clipping at {clip['max_grad_norm']:g} and noise "
        f"multiplier {plan.noise_multiplier:.4g}, on {audit.runs.machine}. The images are synthetic: no private image "
        "was read, and no model is kept."
    )
    if audit.runs.settings["privacy"].get("frozen_until"):
        page.say("privacy.frozen_until is left out: each step audited is one of all parameters.")
    page.table(
        [
            ["check", "", "found"],
            *([check.subject, "ok" if check.holds else "FAILED", check.found] for check in audit.checks),
        ]
    )
    page.say(
        f"{audit.num_tests} tests of random numbers together raise a false alarm with probability at most "
        f"{FALSE_ALARM:g}, and all lower bounds of epsilon (delta {plan.delta:g}) hold with probability "
        f"{1 - FALSE_ALARM:.2%}. {len(audit.included)} canaries take part and {len(audit.excluded)} do not, {EXCLUDED} "
        "for each where a parameter has enough numbers. If each contributed twice the bound, they would show an "
        f"epsilon of about {audit.doubled():.3g}."
    )
    _draw(page, audit)
    page.heading("What this can show")
    page.say(_SHOWS)
    page.heading("What this cannot show")
    page.say(_SHOWS_NOT)
    page.heading("The noise of each parameter")
    by_name = {test.subject: test for test in audit.noise_tests if test.kind == "size"}
    rows = [["parameter", "numbers", "deviation / claimed", "p", "epsilon at least"]]
    for name, size in audit.runs.sizes.items():
        test, shown = by_name[name], audit.shown_by_tensor.get(name)
        bound = "too small for canaries" if shown is None else f"{shown:.3g}"
        rows.append([name, str(size), f"{test.observed:.4f}", f"{test.p_value:.2g}", bound])
    page.table(rows)
    return page


def _draw(page: Document, audit: Audit) -> None:
    caption = (
        "Scores of canaries that took part and that did not, with the claimed densities; and the noise of each "
        "parameter over the claimed noise, with the accepted range"
    )
    with figure(page, "audit", caption, panels=2) as (scores, sizes):
        included, excluded = (values[np.isfinite(values)] for values in (audit.included, audit.excluded))
        low = min([*included, *excluded, -4.0])
        high = max([*included, *excluded, audit.mu + 4.0])
        grid, bins = np.linspace(low, high, 300), np.linspace(low, high, 50)
        drawn = (("took part", included, audit.mu), ("did not take part", excluded, 0.0))
        for number, (label, values, mean) in enumerate(drawn):
            colour = style(number)["color"]
            scores.hist(values, bins, density=True, alpha=0.5, color=colour, label=label)
            scores.plot(grid, stats.norm.pdf(grid, mean), color=colour)
        scores.set(xlabel="score of a canary", ylabel="density")
        scores.legend(frameon=False, fontsize=8)
        tests = [test for test in audit.noise_tests if test.kind == "size" and test.subject in audit.runs.sizes]
        counts = np.array([audit.noise.count(test.subject) for test in tests])
        places = np.arange(len(tests))
        bounds = [np.sqrt(stats.chi2.ppf(q, counts) / counts) for q in (audit.alpha / 2, 1 - audit.alpha / 2)]
        sizes.fill_between(places, *bounds, alpha=0.3, step="mid", color=style(2)["color"], label="accepted")
        sizes.plot(places, [test.observed for test in tests], ".", color=style(1)["color"])
        sizes.set(xlabel="parameter", ylabel="deviation of the noise / claimed")
        sizes.legend(frameon=False, fontsize=8)
