"""FSDP2: trained weights, their gradients and optimizer states in shards over all processes.

A checkpoint holds whole tensors, as every other strategy writes and reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map

from eagle3lab.draft.ttt import TTTOutput

Compute = Callable[[], TTTOutput]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, gathered when it is in shards: then every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, model: Tensor) -> Tensor:
    """A whole tensor, the same on every rank, put on the device and into the shards of `model`."""
    if not isinstance(model, DTensor):
        return tensor.to(model.device)
    # without a source rank nothing is sent: every rank cuts its own part
    return distribute_tensor(tensor.to(model.device), model.device_mesh, model.placements, src_data_rank=None)


class _WholeWhileComputing(nn.Module):
    """A module around the draft whose forward runs any computation on it.

    FSDP2 gathers weights before a module's forward, and its output starts the reduction of their gradients.
    The training step is no forward of the draft, so this module stands for it.
    """

    def __init__(self, draft: nn.Module) -> None:
        super().__init__()
        self.draft = draft
        self.compute: Compute | None = None
        self.output: TTTOutput | None = None

    def forward(self) -> dict[str, Any]:
        assert self.compute is not None
        self.output = output = self.compute()
        return {f.name: getattr(output, f.name) for f in fields(output)}  # FSDP2 looks for tensors in here


class ShardedStrategy(ModelParallelStrategy):
    """One group of shards for the whole draft, over all processes of all nodes.

    One group, because the training-time test runs every layer several times per pack: each weight is gathered
    once and its gradient reduced once per update. Frozen weights stay whole on every process: gathering the
    verifier's embedding for every pack would cost more than all trained weights. Weights are gathered in fp32,
    as autocast expects them.
    """

    def __init__(self, num_replicas: int, backend: str) -> None:
        super().__init__(
            data_parallel_size=num_replicas,
            tensor_parallel_size=1,
            save_distributed_checkpoint=False,
            process_group_backend=backend,
        )
        self._shards: Any = None

    def shard(self, draft: nn.Module) -> Callable[[Compute], TTTOutput]:
        """Cut the draft's trained parameters, in place; returns what a computation on the draft must run in."""
        shards: Any = _WholeWhileComputing(draft)
        frozen = {p for p in draft.parameters() if not p.requires_grad}
        fully_shard(shards, mesh=self.device_mesh["data_parallel"], ignored_params=frozen)
        if self.process_group_backend == "gloo":  # it has no average
            shards.set_force_sum_reduction_for_comms(True)
        self._shards = shards

        def run(compute: Compute) -> TTTOutput:
            shards.compute = compute
            parts = shards()
            output = replace(shards.output, **parts)
            shards.compute = shards.output = None
            if not torch.is_grad_enabled():  # no backward will cut the weights again
                shards.reshard()
            return output

        return run

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Add up gradients on this rank alone, and keep the weights for the next micro-batch."""
        self._set_last(False)
        try:
            yield
        finally:
            self._set_last(True)

    def _set_last(self, last: bool) -> None:
        self._shards.set_requires_gradient_sync(last)
        self._shards.set_reshard_after_backward(last)
        self._shards.set_is_last_backward(last)

    @staticmethod
    def gather(draft: nn.Module) -> None:
        """Give the draft plain, whole parameters again, on the CPU, for its export. Every rank must take part."""
        for module in draft.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if isinstance(parameter, DTensor):
                    plain = nn.Parameter(parameter.detach().full_tensor(), parameter.requires_grad)
                    module.register_parameter(name, plain)
        draft.cpu()

    # checkpoints as the other strategies have them; Lightning's own are bound to FSDP2's names

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return tree_map(_whole_on_cpu, self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return tree_map(_whole_on_cpu, getattr(optimizer, "_optimizer", optimizer).state_dict())

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        held = self.lightning_module.state_dict()
        state = {
            name: placed_like(tensor, held[name]) if name in held else tensor
            for name, tensor in checkpoint["state_dict"].items()
        }
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                index: {
                    # per weight, or one number per tensor
                    key: placed_like(value, parameters[index])
                    if isinstance(value, Tensor) and value.shape == parameters[index].shape
                    else value
                    for key, value in values.items()
                }
                for index, values in saved["state"].items()
            }
            optimizer.load_state_dict({**saved, "state": state})


def _whole_on_cpu(value: Any) -> Any:
    return value.full_tensor().cpu() if isinstance(value, DTensor) else value
