"""When did each rank compute, when did it communicate, and for how long did it only wait?

exposed communication = time in which messages are under way and nothing is computed

def one_step():                                 # on a rank
    with record_trace(model) as recorder:
        train_step(model, …, group=dist.group.WORLD)
    return recorder.spans
trace = Trace.of_ranks(ranks.run(one_step))     # in the notebook
trace.exposed_s(rank=0); plots.trace(trace)
"""

from labsupport.measure.trace.recorder import Recorder, record_trace
from labsupport.measure.trace.spans import (
    COMMUNICATION,
    COMPUTE,
    Interval,
    Span,
    Trace,
    subtract,
    unite,
)

__all__ = [
    "COMMUNICATION",
    "COMPUTE",
    "Interval",
    "Recorder",
    "Span",
    "Trace",
    "record_trace",
    "subtract",
    "unite",
]
