# 004, "Communication Optimization". Changed: imports.
import torch
import torch.distributed as dist

class CommunicationOptimizer:
    """Optimize communication in distributed training"""

    @staticmethod
    def overlap_communication_computation(model, optimizer):
        """Overlap gradient communication with backward pass"""
        # Register gradient hooks
        for param in model.parameters():
            if param.requires_grad:
                param.register_hook(lambda grad: dist.all_reduce(grad, async_op=True))

    @staticmethod
    def gradient_compression(gradients, compression_ratio=0.01):
        """Compress gradients before communication"""
        # Top-k sparsification
        k = int(compression_ratio * gradients.numel())
        _, indices = torch.topk(gradients.abs().view(-1), k)

        compressed = torch.zeros_like(gradients).view(-1)
        compressed[indices] = gradients.view(-1)[indices]

        return compressed.view_as(gradients)

    @staticmethod
    def hierarchical_all_reduce(tensor, world_size):
        """Hierarchical all-reduce for multi-node"""
        # Reduce within node
        node_rank = dist.get_rank() // 8  # Assuming 8 GPUs per node

        # Intra-node reduce
        # ...

        # Inter-node reduce
        # ...
