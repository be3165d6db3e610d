"""Every task is measured, by arms and metrics that exist."""

from __future__ import annotations

from fednl.arms import VIEWS
from fednl.data.tasks import TASKS
from fednl.evaluation.measures import MEASURES, METRICS
from fednl.evaluation.outcomes import Outcome
from fednl.evaluation.settings import ARMS


def test_every_task_has_a_measure_of_known_arms_and_metrics() -> None:
    assert MEASURES.keys() == TASKS.keys()
    for measure in MEASURES.values():
        assert set(measure.arms) <= ARMS.keys() & VIEWS.keys()
        assert set(measure.metrics) <= METRICS.keys()
        if measure.metrics != ("text_nats_per_token",):  # running text has no answers to be right
            assert METRICS[measure.metrics[0]].has_chance and METRICS[measure.metrics[0]].kind == "share"
        assert {arm for pair in measure.pairs for arm in pair} <= set(measure.arms)
        assert len(set(measure.pairs)) == len(measure.pairs)
    assert set(ARMS) == {arm for measure in MEASURES.values() for arm in measure.arms}


def test_metrics_read_what_outcomes_have() -> None:
    assert {metric.field for metric in METRICS.values()} <= set(Outcome.__dataclass_fields__)
    assert METRICS["nats_per_token"].column == "nats/token" and METRICS["macro_f1"].column == "macro-F1, %"
