"""Peak memory of a training step, by part, from the shape alone. No torch here.

A step holds the most at one of a few moments (see :func:`moments`). What is alive at each of them is added up from what
autograd keeps of every layer and what the arithmetic of that moment needs besides; the largest sum is the peak. Nothing
is fitted: tests hold what is kept, and the peak, against the allocator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nanochat.errors import UserError
from nanochat.model.config import ModelConfig
from nanochat.model.cost import parameter_counts

#: Bytes of a number in each dtype of the activations.
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Parameters, gradients and moments outside the tables, logits, softmax: these are fp32 whatever the dtype.
WIDE = 4

#: As in nanochat.model.gpt and nanochat.ops.cross_entropy, which load torch; a test holds them equal.
MOST_LOGITS_AT_ONCE = 2**24
CHUNK_LOGITS = 2**23

PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "workspace", "runtime")

#: What a process on a processor holds besides, once torch has loaded what a step uses: plain, compiled. Measured with
#: benchmarks/forecast.py above the memory after the imports. A GPU's allocator does not count such things.
CPU_RUNTIME_BYTES = (108_000_000, 178_000_000)

AttentionKernel = Literal["fused", "math"]


@dataclass(frozen=True)
class Choices:
    """How a step is computed, as far as memory depends on it."""

    #: Of the activations: float32, bfloat16 or float16.
    dtype: str = "bfloat16"
    #: ``fused`` keeps no probabilities (flash, memory-efficient; blocks within windows); ``math`` keeps all of them.
    attention: AttentionKernel = "fused"
    #: Logits in chunks; None as the model decides, by their number.
    chunked_loss: bool | None = None
    #: Forget what is inside each block and compute it again in backward.
    recompute_activations: bool = False
    compiled: bool = True
    #: Several micro-batches a step: gradients of the earlier ones are there during the later ones.
    accumulate: bool = True
    #: Processors norm bf16 in an fp32 copy of their own where nothing is compiled; and the whole process counts.
    on_cpu: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in BYTES:
            raise UserError(f"dtype {self.dtype!r} is not one we compute in: choose {', '.join(BYTES)}")

    @property
    def width(self) -> int:
        """Bytes of one number of the activations."""
        return BYTES[self.dtype]

    @property
    def table_width(self) -> int:
        """Bytes of one number of the embeddings: stored like the activations, but never in float16."""
        return WIDE if self.dtype == "float16" else self.width

    @property
    def norm_width(self) -> int:
        """Bytes that a norm keeps of each number it has read."""
        return WIDE if self.on_cpu and not self.compiled else self.width


@dataclass(frozen=True)
class Memory:
    """Bytes alive at one moment of a step, by part (:data:`PARTS`)."""

    moment: str
    parts: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


def step_memory(config: ModelConfig, device_batch: int, sequence_len: int, choices: Choices) -> Memory:
    """Peak of a training step on one device: of what a GPU's allocator hands out, or of a process above its imports.

    It is what is in use. A process may hold a third more: glibc's malloc keeps freed blocks of up to 32 MB.

    Args:
        device_batch: rows of a forward pass.
        sequence_len: tokens in a row, which may be other than the configured length.
    """
    return max(moments(config, device_batch, sequence_len, choices), key=lambda moment: moment.peak_bytes)


def moments(config: ModelConfig, device_batch: int, sequence_len: int, choices: Choices) -> list[Memory]:
    """The moments at which a step may hold the most.

    Loss: all activations and the logits with their gradients. Last block: the logits are gone, but backward works
    inside a block. End of backward: a compiled one hands out all gradients at once. Update: no activations.
    """
    num_tokens = device_batch * sequence_len
    weights, moment_bytes = weight_bytes(config, choices), optimizer_bytes(config, choices)
    held = weights if choices.accumulate else 0
    kept = activation_bytes(config, device_batch, sequence_len, choices)
    casts = cast_bytes(config, choices)
    logits = _loss_bytes(config, num_tokens, choices)
    head_gradient = 0 if choices.accumulate else WIDE * config.padded_vocab_size * config.model_dim
    within = _within_block_bytes(config, device_batch, sequence_len, choices)
    runtime = CPU_RUNTIME_BYTES[choices.compiled] if choices.on_cpu else 0
    fixed = {"weights": weights + _rotary_bytes(config), "optimizer": moment_bytes, "runtime": runtime}

    def moment(name: str, gradients: int, activations: int, logits: int, workspace: int) -> Memory:
        varying = {"gradients": gradients, "activations": activations, "logits": logits, "workspace": workspace}
        return Memory(name, fixed | varying)

    found = [
        moment("loss", held, kept, logits, casts),
        moment("last block", held + head_gradient, kept, 0, casts + within),
        moment("update", weights, 0, 0, _update_bytes(config, choices)),
    ]
    if choices.compiled:
        found.append(moment("end of backward", held + weights, 0, 0, 0))
    return found


def weight_bytes(config: ModelConfig, choices: Choices) -> int:
    """Of the parameters; the gradients take as much."""
    counts = parameter_counts(config)
    tables = counts.wte + counts.value_embeds
    return tables * choices.table_width + (counts.total - tables) * WIDE


def optimizer_bytes(config: ModelConfig, choices: Choices) -> int:
    """Of the moments: two of each parameter for AdamW; of matrices a momentum, and a second moment of one axis."""
    counts = parameter_counts(config)
    adam = weight_bytes(config, choices) - counts.transformer_matrices * WIDE
    lines = sum(count * max(rows, columns) for (rows, columns), count in matrix_shapes(config).items())
    return 2 * adam + (counts.transformer_matrices + lines) * WIDE


def matrix_shapes(config: ModelConfig) -> dict[tuple[int, int], int]:
    """How many matrices of each shape (rows, columns) the blocks hold: the stacks of Muon."""
    dim, kv_dim, layers = config.model_dim, config.kv_dim, config.num_layers
    shapes: dict[tuple[int, int], int] = {}
    for shape, count in (
        ((dim, dim), 2 * layers),
        ((kv_dim, dim), 2 * layers),
        ((4 * dim, dim), layers),
        ((dim, 4 * dim), layers),
        ((config.num_kv_heads, config.constants.value_gate_channels), len(config.value_embed_layers)),
    ):
        if count:
            shapes[shape] = shapes.get(shape, 0) + count
    return shapes


def activation_bytes(config: ModelConfig, device_batch: int, sequence_len: int, choices: Choices) -> int:
    """What autograd keeps of the whole forward pass, casts of matrices and the loss aside."""
    num_tokens = device_batch * sequence_len
    ends = 2 * choices.norm_width + (3 if config.constants.smear else 1) * choices.width
    if config.backout_layer == config.num_layers - 1:
        ends += choices.width
    blocks = 0
    for layer in range(config.num_layers):
        if choices.recompute_activations:
            blocks += num_tokens * config.model_dim * choices.width
        else:
            blocks += block_bytes(config, layer, device_batch, sequence_len, choices)
    ids = 2 * 8 * num_tokens
    rotary = sequence_len * config.head_dim * (choices.width if choices.width < WIDE else 0)
    return num_tokens * config.model_dim * ends + blocks + ids + rotary


def block_bytes(config: ModelConfig, layer: int, device_batch: int, sequence_len: int, choices: Choices) -> int:
    """What autograd keeps of one block.

    Per channel: the stream before the block; before and after each of the two norms; q and k before their norms; what
    attention reads and gives; the MLP's hidden layer after relu and after the square, each four times as wide.
    """
    num_tokens, width, norm_width = device_batch * sequence_len, choices.width, choices.norm_width
    kv_share = config.num_kv_heads / config.num_heads
    windowed = config.windows[layer] < sequence_len - 1 and choices.attention == "fused"
    read = 1 + 2 * (kv_share if windowed else 1)  # a fused kernel reads keys and values repeated to all heads
    channel = width * (3 + 8 + read + 1) + norm_width * (2 + 1 + kv_share)
    heads = WIDE * (config.num_heads + config.num_kv_heads + 2)  # one number per norm
    if not windowed:
        heads += WIDE * config.num_heads  # log of each softmax' sum
    if layer in config.value_embed_layers:
        channel += width * kv_share
        heads += 2 * width * config.num_kv_heads
    kept = round(num_tokens * (config.model_dim * channel + heads))
    if choices.attention == "math":
        kept += probability_bytes(config, device_batch, sequence_len, choices)
    return kept


def probability_bytes(config: ModelConfig, device_batch: int, sequence_len: int, choices: Choices) -> int:
    """All attention weights (B, H, T, T) of one layer, which only the math kernel keeps."""
    return device_batch * config.num_heads * sequence_len**2 * choices.width


def chunks_loss(config: ModelConfig, num_tokens: int, choices: Choices) -> bool:
    """Whether the logits of a batch are computed in chunks."""
    if choices.chunked_loss is not None:
        return choices.chunked_loss
    return num_tokens * config.vocab_size > MOST_LOGITS_AT_ONCE


def _loss_bytes(config: ModelConfig, num_tokens: int, choices: Choices) -> int:
    """Logits and everything of their kind at the fullest moment of the loss, forward or backward.

    In chunks that is one chunk of them, and gradients of the hidden states and of the matrix, each twice in backward.
    """
    vocab, rows, width = config.vocab_size, config.padded_vocab_size, choices.width
    if not chunks_loss(config, num_tokens, choices):
        if choices.compiled:  # the product and its gradient, once more where padding is cropped; all between is fused
            return num_tokens * width * (2 * rows + (vocab if rows != vocab else 0))
        # The product, and in fp32 tanh, logits and log-softmax; or the last two, and two gradients.
        return num_tokens * max(rows * width + 3 * vocab * WIDE, 4 * vocab * WIDE)
    matrix, hidden = rows * config.model_dim, num_tokens * config.model_dim
    chunk = min(max(1, CHUNK_LOGITS // vocab), num_tokens) * vocab
    narrow = width if width < WIDE else 0
    forward = 2 * chunk * WIDE + chunk * narrow + 2 * matrix * narrow
    backward = matrix * WIDE + hidden * (WIDE + narrow)
    return hidden * width + matrix * WIDE + max(forward, backward)


def _within_block_bytes(config: ModelConfig, device_batch: int, sequence_len: int, choices: Choices) -> int:
    """What backward needs inside the last block beyond what forward kept of it."""
    unit = device_batch * sequence_len * config.model_dim * choices.width
    last = config.num_layers - 1
    # Gradients of the hidden layer of the MLP before and after the square, and a factor between them.
    mlp = (5 if choices.compiled else 9) * unit
    table = config.padded_vocab_size * config.kv_dim * choices.table_width if config.value_embed_layers else 0
    attention = table + (4 - 8) * unit
    if choices.attention == "math":
        attention += 2 * probability_bytes(config, device_batch, sequence_len, choices)
    within = max(mlp, attention)
    if choices.recompute_activations:
        within += block_bytes(config, last, device_batch, sequence_len, choices) - unit
    return within


def _update_bytes(config: ModelConfig, choices: Choices) -> int:
    """What the update of the largest stack of matrices, or of the largest table, needs for itself.

    Muon: parameters and gradients stacked, the blended gradient and what becomes of it. AdamW: two temporaries, and
    fp32 copies of whatever is stored in less.
    """
    needed = []
    for (rows, columns), count in matrix_shapes(config).items():
        shorter = min(rows, columns) / max(rows, columns)
        orthogonalizing = 12 + 6 + 4 * shorter if choices.dtype == "bfloat16" else 24 + 8 * shorter
        stepping = 29  # seven of that size in fp32, and one in bool
        needed.append(round(count * rows * columns * max(orthogonalizing, stepping)))
    table = config.padded_vocab_size * max(config.model_dim, config.kv_dim)
    needed.append(table * (2 * WIDE if choices.table_width == WIDE else 6 * WIDE))
    return max(needed)


def cast_bytes(config: ModelConfig, choices: Choices) -> int:
    """Matrices in the dtype of the activations, kept from forward to backward."""
    if choices.width == WIDE:
        return 0
    counts = parameter_counts(config)
    blocks = 0 if choices.recompute_activations else counts.transformer_matrices
    return (blocks + counts.lm_head) * choices.width


def _rotary_bytes(config: ModelConfig) -> int:
    return config.max_text_len * config.head_dim * WIDE
