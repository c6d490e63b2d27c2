# 000, "Communication Primitives". Changed: imports.
from torch import Tensor
from distributed import reduce_scatter, all_reduce, all_gather, broadcast, ReduceOp

# All-reduce: Sum tensors across all processes
tensor = Tensor([[1, 2, 3]])
reduced = all_reduce(tensor, ReduceOp.SUM)

# All-gather: Collect tensors from all processes
gathered = all_gather(tensor)  # Returns list of tensors

# Broadcast: Send tensor from one process to all
broadcast_tensor = broadcast(tensor, src=0)  # From rank 0

# Reduce-scatter: Reduce and scatter chunks
scattered = reduce_scatter(tensor, ReduceOp.AVERAGE)
