"""Power cuts on a real file system: trials if the machine allows them, otherwise a reason."""

from __future__ import annotations

from conformance.processes.forked_ranks import fan_out
from conformance.storage.crash_states.enumeration import PRELOAD
from conformance.storage.power_cuts import loop_image, power_cut


def test_stock_dcp_saving_over_a_step_is_broken_by_a_power_cut_or_there_is_a_reason_why_none_was_tried() -> None:
    job = power_cut.Job(subject="stock", scenario="resave", flushing="flushed always", every=3)
    (trials,) = fan_out(power_cut.examine, [job], workers=1, preload=PRELOAD)
    assert trials.error == ""
    if loop_image.why_not() or trials.skipped:
        assert (trials.count, trials.broken) == (0, ())
    else:
        assert trials.count >= 8
        assert any("O3" in oracles for _, oracles in trials.broken)
