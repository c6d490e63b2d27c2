# 004, "Tensor Parallelism". Changed: import.
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist

class ColumnParallelLinear(nn.Module):
    """Column-parallel linear layer"""

    def __init__(self, in_features, out_features, world_size):
        super().__init__()
        self.world_size = world_size
        self.rank = dist.get_rank()

        # Each GPU gets a slice of columns
        self.out_features_per_partition = out_features // world_size

        self.weight = nn.Parameter(
            torch.randn(self.out_features_per_partition, in_features)
        )
        self.bias = nn.Parameter(
            torch.randn(self.out_features_per_partition)
        )

    def forward(self, x):
        # Local matrix multiplication
        output_parallel = F.linear(x, self.weight, self.bias)

        # All-gather to combine results
        output_list = [torch.zeros_like(output_parallel) for _ in range(self.world_size)]
        dist.all_gather(output_list, output_parallel)

        # Concatenate along feature dimension
        output = torch.cat(output_list, dim=-1)

        return output

class RowParallelLinear(nn.Module):
    """Row-parallel linear layer"""

    def __init__(self, in_features, out_features, world_size):
        super().__init__()
        self.world_size = world_size
        self.rank = dist.get_rank()

        # Each GPU gets a slice of rows
        self.in_features_per_partition = in_features // world_size

        self.weight = nn.Parameter(
            torch.randn(out_features, self.in_features_per_partition)
        )
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, x):
        # Split input across GPUs
        input_parallel = x.chunk(self.world_size, dim=-1)[self.rank]

        # Local matrix multiplication
        output_parallel = F.linear(input_parallel, self.weight)

        # All-reduce to sum partial results
        dist.all_reduce(output_parallel, op=dist.ReduceOp.SUM)

        # Add bias (only on one GPU)
        if self.rank == 0:
            output_parallel = output_parallel + self.bias

        return output_parallel

class TensorParallelTransformer(nn.Module):
    """Transformer with tensor parallelism"""

    def __init__(self, d_model, nhead, world_size):
        super().__init__()

        # Column-parallel for QKV
        self.qkv_proj = ColumnParallelLinear(d_model, 3 * d_model, world_size)

        # Row-parallel for output
        self.out_proj = RowParallelLinear(d_model, d_model, world_size)

        # Column-parallel for FFN
        self.fc1 = ColumnParallelLinear(d_model, 4 * d_model, world_size)
        self.fc2 = RowParallelLinear(4 * d_model, d_model, world_size)

    def forward(self, x):
        # Self-attention with tensor parallelism
        qkv = self.qkv_proj(x)
        # ... attention computation ...
        attn_output = self.out_proj(attn_output)

        # FFN with tensor parallelism
        ffn_output = self.fc1(attn_output)
        ffn_output = F.relu(ffn_output)
        ffn_output = self.fc2(ffn_output)

        return ffn_output
