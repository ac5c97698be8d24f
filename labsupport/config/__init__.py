"""How big is the model, how is it split, and how is it trained?

    global_batch_size = micro_batch_size × gradient_accumulation_steps × data_parallel_size
    world_size        = data_parallel_size × tensor_ × pipeline_ × context_parallel_size

    model = ModelConfig.named("tiny")                   # model.num_params == 1_311_872
    parallel = ParallelConfig(data_parallel_size=2)     # parallel.world_size == 2
    train = TrainConfig(micro_batch_size=8)             # train.global_batch_size(parallel) == 16

Checked when built. What follows from other sizes is a property, so no two numbers can disagree.
"""

from labsupport.config.fits import check_fits
from labsupport.config.model import ModelConfig, RopeScaling
from labsupport.config.parallel import DataParallelSharding, ParallelConfig, PipelineSchedule
from labsupport.config.recompute import Recompute
from labsupport.config.train import MixedPrecision, Optimizer, TrainConfig

IGNORE_INDEX = -100  # the label of a token that the loss leaves out, as in PyTorch and transformers

__all__ = [
    "IGNORE_INDEX",
    "DataParallelSharding",
    "MixedPrecision",
    "ModelConfig",
    "Optimizer",
    "ParallelConfig",
    "PipelineSchedule",
    "Recompute",
    "RopeScaling",
    "TrainConfig",
    "check_fits",
]
