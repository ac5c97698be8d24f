"""When do the buckets leave, and how long does a rank wait for the last one to come back?

    gradients  lm_head ▸ layer L ▸ … ▸ layer 1 ▸ embedding       ready one after the other
    backward   ████████████████████████
    messages          ▬▬▬▬  ▬▬▬▬  ▬▬▬▬ ▬▬▬▬                      one at a time, each when ready
    exposed                            ▫▫▫▫                      the end that nothing hides

    grads = gradients_of(ModelConfig.named("1b"), bytes_per_gradient=2)
    step = {"bucket_bytes": 25 * 2**20, "backward_s": 0.2, "world_size": 8}
    plan = sync_during_backward(grads, link=roads()["nvlink4"], **step)
    plan.exposed_s, len(plan.messages)

Two rough assumptions: a matrix's share of the backward is its share of the matrices' numbers (the
embedding, a look-up, takes no time), and messages do not slow the computation down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from labsupport.config import ModelConfig
from labsupport.plan.communication import predict, ring_all_reduce


class Link(Protocol):
    """The two numbers of a wire: a `LinkFit` or a `Road`."""

    @property
    def latency_s(self) -> float: ...
    @property
    def bandwidth_bytes_per_s(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class Gradient:
    """The gradient of one parameter."""

    size_bytes: int
    ready: float
    """Share of the backward that is over when it is there."""


@dataclass(frozen=True, kw_only=True)
class Message:
    """One all-reduce of one bucket; the backward begins at 0 s."""

    size_bytes: int
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class GradientSync:
    """The messages of one step, on a clock that starts with the backward. Label: predicted."""

    backward_s: float
    messages: tuple[Message, ...]

    @property
    def communication_s(self) -> float:
        """Seconds in which a message is under way."""
        return math.fsum(message.end_s - message.start_s for message in self.messages)

    @property
    def exposed_s(self) -> float:
        """Seconds from the end of the backward to the arrival of the last message."""
        last = max((message.end_s for message in self.messages), default=0.0)
        return max(0.0, last - self.backward_s)


def gradients_of(config: ModelConfig, *, bytes_per_gradient: int = 4) -> tuple[Gradient, ...]:
    """The gradients of `model.Llama`, in the order in which the backward finishes them.

    That is the reverse of `model.parameters()`. A tied matrix comes last: it is also the embedding.
    """
    h, kv = config.hidden_size, config.num_kv_heads * config.head_dim
    q, wide = config.num_heads * config.head_dim, config.intermediate_size
    block = [h, h, *3 * [wide * h], h * q, kv * h, kv * h, q * h]  # norms, mlp, o, v, k, q
    head = config.vocab_size * h
    numbers = [head, h, *config.num_layers * block]
    ready = [done / sum(numbers) for done in accumulate(numbers)]
    sent = [*zip(numbers, ready, strict=True), (head, 1.0)]
    return tuple(
        Gradient(size_bytes=n * bytes_per_gradient, ready=share)
        for n, share in (sent[1:] if config.tie_word_embeddings else sent)
    )


def cut_into_buckets(gradients: Sequence[Gradient], *, bucket_bytes: int) -> tuple[Gradient, ...]:
    """Neighbours share a bucket up to `bucket_bytes`, a larger gradient has its own.

    A bucket is ready with its last gradient. A `bucket_bytes` of 1 is a message for every tensor.
    Raises ValueError below that.
    """
    if bucket_bytes < 1:
        raise ValueError(f"{bucket_bytes=} must be at least 1, for example {25 * 2**20}")
    buckets: list[Gradient] = []
    for gradient in gradients:
        size_bytes = gradient.size_bytes
        if buckets and buckets[-1].size_bytes + size_bytes <= bucket_bytes:
            size_bytes += buckets.pop().size_bytes
        buckets.append(Gradient(size_bytes=size_bytes, ready=gradient.ready))
    return tuple(buckets)


def sync_after_backward(
    gradients: Sequence[Gradient],
    *,
    bucket_bytes: int,
    backward_s: float,
    link: Link,
    world_size: int,
) -> GradientSync:
    """Nothing leaves before the backward is over: all communication is exposed."""
    late = [Gradient(size_bytes=gradient.size_bytes, ready=1.0) for gradient in gradients]
    return sync_during_backward(
        late, bucket_bytes=bucket_bytes, backward_s=backward_s, link=link, world_size=world_size
    )


def sync_during_backward(
    gradients: Sequence[Gradient],
    *,
    bucket_bytes: int,
    backward_s: float,
    link: Link,
    world_size: int,
) -> GradientSync:
    """A bucket leaves once it is ready and the message before it has arrived."""
    messages, free_s = [], 0.0
    for bucket in cut_into_buckets(gradients, bucket_bytes=bucket_bytes):
        cost = ring_all_reduce(size_bytes=bucket.size_bytes, world_size=world_size)
        took = predict(
            cost, latency_s=link.latency_s, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s
        )
        start_s = max(bucket.ready * backward_s, free_s)
        free_s = start_s + took.total_s
        messages.append(Message(size_bytes=bucket.size_bytes, start_s=start_s, end_s=free_s))
    return GradientSync(backward_s=backward_s, messages=tuple(messages))
