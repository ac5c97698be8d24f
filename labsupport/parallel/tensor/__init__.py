"""How is one layer split over ranks? Columns, rows, heads, vocabulary, and the tokens between them.

by_hand.py: functions.py (who says what), layers.py (who holds what), loss.py
native.py:  the same from torch's parallelize_module

model = tensor_parallel(Llama(config), mesh["tp"], sequence_parallel=True)
"""

from labsupport.parallel.tensor.by_hand import tensor_parallel_by_hand
from labsupport.parallel.tensor.loss import vocab_parallel_token_loss
from labsupport.parallel.tensor.native import tensor_parallel

__all__ = ["tensor_parallel", "tensor_parallel_by_hand", "vocab_parallel_token_loss"]
