"""Instruments: what really happened, how often it was tried, and how far the tries lie apart.

Every function here measures; predictions live in `labsupport.plan`, in objects of their own.

    from labsupport.measure.timing import time_call
    from labsupport.measure.collectives import ALL_REDUCE
    from labsupport.measure.bench import bench_collectives
"""
