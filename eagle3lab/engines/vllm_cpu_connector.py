"""vLLM's connector for hidden states where there is no CUDA: no streams, no events, no pinned memory.

vLLM loads this module by name (`kv_connector_module_path`) in its workers. Everything but the copy out of
the cache is the stock connector's.
"""

from __future__ import annotations

import fcntl
import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class _Done:
    """Stands in for a CUDA event: a copy on the CPU is complete when it returns."""

    def synchronize(self) -> None:
        return

    def query(self) -> bool:
        return True


class CPUHiddenStatesConnector(stock.ExampleHiddenStatesConnector):
    """`ExampleHiddenStatesConnector` with a copy that needs no device."""

    def _submit_async_write(self, pending: Any) -> None:
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.int64)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)[None]).flatten()
        num_tokens = pending.token_ids.shape[0]
        hidden = stock.extract_from_kv_cache(self._kv_cache, slots, num_tokens).clone(
            memory_format=torch.contiguous_format
        )
        Path(pending.filename).parent.mkdir(parents=True, exist_ok=True)
        lock = self._lock_fds.pop(pending.req_id, None)
        if lock is None and self.use_lock:
            lock = os.open(f"{pending.filename}.lock", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            fcntl.flock(lock, fcntl.LOCK_EX)
        tensors = {"hidden_states": hidden, "token_ids": pending.token_ids.clone()}
        self._req_copy_events[pending.req_id] = _Done()
        future = self._executor.submit(self._write_tensors, tensors, _Done(), pending.filename, lock)
        self._req_futures[pending.req_id] = future
        future.add_done_callback(partial(self._on_write_done, pending.req_id))
