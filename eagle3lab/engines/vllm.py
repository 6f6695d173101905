"""One vLLM engine in this process or below it. The only module that imports vllm, beside the CPU connector."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
import transformers

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.engines.base import Answer, EngineDied, EngineError, Sampling, first_line
from eagle3lab.engines.deadline import child_processes, deadline
from eagle3lab.engines.process_state import remember_process
from eagle3lab.engines.turns import Backlog
from eagle3lab.engines.vllm_capabilities import installed_version, require_vllm
from eagle3lab.engines.vllm_cpu_sampling import mend_sampler
from eagle3lab.engines.vllm_cpu_start import mend_start
from eagle3lab.engines.vllm_decode import DecodedPass, DecodeRequest, decode_pass
from eagle3lab.engines.vllm_files import drop_files, file_of
from eagle3lab.engines.vllm_settings import VllmSettings
from eagle3lab.engines.vllm_turns import in_process, turns_over
from eagle3lab.engines.vllm_worker import rank_zero

T = TypeVar("T")
TOP_LOGITS = 20  # vLLM's own limit for a request
CLOSE_SECONDS = 120.0


class VllmRunner:
    """`vllm.LLM` as an `EngineRunner` or a `DecodingRunner`; hidden states are handed over as files."""

    def __init__(self, settings: VllmSettings) -> None:
        """Load the verifier.

        Raises:
            UserError: vllm is missing, too old, cannot run this verifier, or is not ready in time.
        """
        self._put_back = remember_process()
        settings.prepare_environment()
        try:
            require_vllm(settings.device, decodes=settings.decoding is not None)
        except UserError:
            self._put_back()
            raise
        import vllm

        if settings.device == "cpu":
            mend_start()
            if settings.decoding is not None:
                mend_sampler()
        self.settings = settings
        self._calls = 0
        self._dead: str | None = None
        self._spare = child_processes()
        self._llm: Any = None
        self._backlog = Backlog()
        try:
            with deadline(settings.start_seconds, "starting vLLM", spare=self._spare):
                self._llm = vllm.LLM(**settings.arguments())
            self._turns = turns_over(self._llm)
            self._require_long_prompts_fit()
        except UserError:
            self.close()
            raise
        except Exception as error:
            if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
                self._clear_process()
            self._put_back()
            raise UserError(
                Problem(
                    f"vLLM {vllm.__version__} could not load the verifier ({first_line(error)})",
                    str(settings.path),
                    "a verifier that this vLLM serves, on devices that hold it",
                    f"hardware.engine.tensor_parallel=N, hardware.engine.memory_share=0.8, {settings.instead}; "
                    "VLLM_LOGGING_LEVEL=INFO shows vLLM's own account",
                )
            ) from error

    def versions(self) -> dict[str, str]:
        """vllm, torch, transformers, the compute dtype and the tensor-parallel size."""
        return {
            "vllm": str(installed_version()),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": self.settings.dtype,
            "tensor_parallel": str(self.settings.tensor_parallel),
        }

    def ask(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Prefill every row; returns the file of each row's states, which may still be being written.

        Raises:
            EngineError: no answer; `EngineDied` when there will be no other.
        """
        outputs = self._generate(rows, max_tokens=1)
        files = [file_of(output) for output in outputs]
        if len(files) != len(rows) or not all(files):
            drop_files(files)
            raise EngineError(f"vLLM named {sum(map(bool, files))} files of states for {len(rows)} rows")
        return [str(file) for file in files]

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], str | None]:
        """Greedy token ids, the end token included, and the file of the prompt's states (to be removed)."""
        (output,) = self._generate([prompt], max_tokens=max_new_tokens)
        return list(output.outputs[0].token_ids), file_of(output)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
    ) -> list[Answer]:
        """One answer per prompt, from a single request to vLLM's scheduler; raises as `ask`."""
        requests = list(zip(seeds, max_new_tokens, strict=True))
        outputs = self._generate(prompts, requests=requests, sampling=sampling)
        ends = [output.outputs[0] for output in outputs]
        return [Answer(tuple(end.token_ids), end.finish_reason == "stop") for end in ends]

    def decode(
        self, requests: Sequence[DecodeRequest], temperature: float, at_once: int, end_ids: Collection[int]
    ) -> DecodedPass:
        """Decode with the draft that the engine was started with, or without one; raises as `ask`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        def parameters(seed: int, most: int) -> SamplingParams:
            limits = {"seed": seed, "max_tokens": most, "ignore_eos": True, "detokenize": False}
            return SamplingParams(temperature=temperature, output_kind=RequestOutputKind.DELTA, **limits)

        decoding, engine = self.settings.decoding, self._llm.llm_engine
        assert decoding is not None
        how: dict[str, Any] = {"at_once": at_once, "end_ids": end_ids, "k": decoding.k}
        num_tokens = sum(len(r.prompt) + r.budget for r in requests)
        return self._bounded(num_tokens, lambda: decode_pass(engine, requests, parameters, **how))

    def top_logits(self, rows: Sequence[Sequence[int]]) -> list[dict[int, float]]:
        """The verifier's largest logits after each row, by token id; raises as `ask`."""
        outputs = self._generate(rows, logprobs=TOP_LOGITS)
        return [
            {int(token): float(entry.logprob) for token, entry in output.outputs[0].logprobs[0].items()}
            for output in outputs
        ]

    def record(self, row: Sequence[int], layer_ids: Sequence[int], path: str) -> list[str]:
        """Prefill one row with our own hooks in the workers, whose recording goes to `path`.

        Returns the files that vLLM's own extraction wrote for it, to be removed.
        """
        self._call("eagle3lab_record", list(layer_ids))
        try:
            files = self.ask([row])
        except EngineError:
            if not self._dead:
                self._call("eagle3lab_save", path)  # takes the hooks off
            raise
        answer = self._call("eagle3lab_save", path)
        if answer["num_tokens"] != len(row):
            drop_files(files)
            raise EngineError(f"the hooks saw {answer['num_tokens']} tokens of {len(row)}")
        return files

    def close(self) -> None:
        """End the engine's processes, by force after `CLOSE_SECONDS`, and free its memory."""
        if self._llm is None:
            return
        core = self._llm.llm_engine.engine_core
        in_this_process = in_process(self._llm)
        self._llm = None
        # EngineDied says that they were ended by force, and ended they should be
        with (
            contextlib.suppress(EngineDied),
            deadline(CLOSE_SECONDS, "closing vLLM", spare=self._spare, may_end=True),
        ):
            core.shutdown()
        del core
        gc.collect()
        if in_this_process:
            self._clear_process()
        self._put_back()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _clear_process(self) -> None:
        """An engine in this process leaves a connector and process groups that a second one could not share."""
        importlib.import_module("vllm.distributed.kv_transfer").ensure_kv_transfer_shutdown()
        importlib.import_module("vllm.distributed.parallel_state").cleanup_dist_env_and_memory()

    def _generate(
        self,
        rows: Sequence[Sequence[int]],
        *,
        max_tokens: int = 1,
        requests: Sequence[tuple[int | None, int]] = (),
        sampling: Sampling | None = None,
        logprobs: int | None = None,
    ) -> list[Any]:
        """Greedy for `max_tokens`, unless every row has a (seed, max_tokens) of its own in `requests`."""
        from vllm import SamplingParams

        requests = requests or [(None, max_tokens)] * len(rows)

        def ask() -> list[Any]:
            drawn = sampling or Sampling(0.0, 1.0, 0, self.settings.eos_token_ids)
            parameters = [
                SamplingParams(
                    temperature=drawn.temperature,
                    top_p=drawn.top_p,
                    top_k=drawn.top_k,
                    seed=seed,
                    max_tokens=most,
                    stop_token_ids=list(drawn.stop_token_ids),
                    detokenize=False,
                    logprobs=logprobs,
                )
                for seed, most in requests
            ]
            return self._turns.ask([{"prompt_token_ids": list(row)} for row in rows], parameters)

        return self._bounded(sum(map(len, rows)) + sum(most for _, most in requests), ask)

    def _bounded(self, num_tokens: int, work: Callable[[], T]) -> T:
        """What `work` over `num_tokens` returns, within its time; raises as `ask`."""
        if self._dead or self._llm is None:
            raise EngineDied(self._dead or "the engine is closed")
        try:
            with (
                self._backlog.behind(num_tokens) as all_tokens,
                deadline(
                    self.settings.answer_seconds(all_tokens),
                    "a request to vLLM",
                    spare=self._spare,
                    wake=self._wake,
                ),
            ):
                return work()
        except EngineDied as error:
            self._dead = str(error)
            raise
        except EngineError:
            raise
        except Exception as error:
            kind = type(error).__name__
            # a scheduler in this very process may go round for ever now
            if "Dead" in kind or in_process(self._llm):
                self._dead = f"vLLM ended ({kind}: {first_line(error)})"
            if self._dead:
                raise EngineDied(self._dead) from error
            raise EngineError(f"{kind}: {first_line(error)}") from error

    def _require_long_prompts_fit(self) -> None:
        """Without chunked prefill a prompt beyond one forward's tokens would wait for ever."""
        scheduler = self._llm.llm_engine.vllm_config.scheduler_config
        chunked = getattr(scheduler, "enable_chunked_prefill", True)
        if not chunked and self.settings.max_len > scheduler.max_num_batched_tokens:
            raise UserError(
                Problem(
                    f"vLLM does not prefill {self.settings.model_type} in chunks here, and the longest row has "
                    f"{self.settings.max_len} tokens; extract.batch_tokens",
                    self.settings.batch_tokens,
                    "one forward that holds every row",
                    f"extract.batch_tokens={self.settings.max_len + 1}",
                )
            )

    def _wake(self) -> None:
        """Make whoever waits for the engine's output fail: here by the next step, else by its queue."""
        core = self._llm.llm_engine.engine_core
        stopped = TimeoutError("the engine was ended")
        self._dead = self._dead or str(stopped)

        def stop() -> None:
            raise stopped

        if in_process(self._llm):
            core.get_output = stop
        elif hasattr(core, "outputs_queue"):
            core.outputs_queue.put_nowait(stopped)
            for call in list(getattr(core, "utility_results", {}).values()):
                if not call.done():
                    call.set_exception(stopped)

    def _call(self, method: str, *arguments: Any) -> Any:
        """A call to every worker; the answer of rank 0 to this very call."""
        self._calls += 1
        seconds = self.settings.least_seconds
        try:
            with deadline(seconds, f"{method} in vLLM's workers", spare=self._spare, wake=self._wake):
                answer = self._llm.collective_rpc(method, args=(self._calls, *arguments))
        except EngineDied as error:
            self._dead = str(error)
            raise
        return rank_zero(answer, self._calls)
