"""Number of KV blocks, and the memory plan.

The number of blocks is given, or follows from the size of the KV cache, or on a GPU from the memory
that the largest step leaves; the KV pool never takes more than is free.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pagedserve._core import KVGroup
from pagedserve.cache.layers import WindowKind
from pagedserve.errors import ConfigError

GIB: Final = 1 << 30
DEFAULT_KV_CACHE_BYTES: Final = GIB
_DEFAULT_SWAP_BYTES: Final = 4 * GIB

# Reserve for activations, the tokenizer and the interpreter.
_FREE_SHARE: Final = 0.9

# Files with limit and usage of version 2 and of version 1.
_CONTROL_GROUP_FILES: Final = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableMemory:
    """Memory of a device for KV blocks, and how it was computed; bytes.

    Attributes:
        num_bytes: Memory for KV blocks.
        total_bytes: The device's memory.
        budget_bytes: Fraction of it that may be used.
        used_bytes: Used after the model is loaded, by this process and others.
        activation_bytes: Peak memory of a step above that.
        graph_bytes: Reserved for CUDA graphs.
    """

    num_bytes: int
    total_bytes: int
    budget_bytes: int
    used_bytes: int
    activation_bytes: int
    graph_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowNeed:
    """Requirements of layers with a sliding window or chunks, and separate KV blocks.

    Attributes:
        window: Widest window of these layers, or their chunk size, in tokens.
        block_bytes: Bytes of one block over these layers.
        least_blocks: Blocks for one sequence.
        most_blocks: Blocks for the maximum number of sequences, and as many prefixes if cached.
        kind: Kind of their KV group.
    """

    window: int
    block_bytes: int
    least_blocks: int
    most_blocks: int
    kind: WindowKind = "window"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory plan, in bytes unless named otherwise.

    Attributes:
        weight_bytes: Parameters and buffers of the model.
        block_bytes: One KV block over all layers, keys and values.
        block_size: Tokens per block.
        num_gpu_blocks: Blocks of the pool.
        num_cpu_blocks: Blocks for preempted requests, in host memory.
        free_bytes: Free after the model is loaded, before the pool is allocated.
        available: Result of the profile run on a GPU; None without one.
        groups: KV groups with a separate pool: layers with windows or chunks, recurrent states.
        group_bytes: One block of each of them over its layers.
    """

    weight_bytes: int
    block_bytes: int
    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    free_bytes: int
    available: AvailableMemory | None = None
    groups: tuple[KVGroup, ...] = ()
    group_bytes: tuple[int, ...] = ()

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool of the layers that keep all keys and values."""
        return self.num_gpu_blocks * self.block_bytes

    @property
    def group_pool_bytes(self) -> int:
        """Bytes of the pools of ``groups``."""
        pools = zip(self.groups, self.group_bytes, strict=True)
        return sum(group.num_gpu_blocks * size for group, size in pools)

    @property
    def swap_bytes(self) -> int:
        """Bytes of the whole swap space; used once something is swapped out."""
        pools = zip(self.groups, self.group_bytes, strict=True)
        beside = sum(group.num_cpu_blocks * size for group, size in pools)
        return self.num_cpu_blocks * self.block_bytes + beside

    def describe(self) -> str:
        """Format the plan: a line each for weights, pool and the rest.

        After a profile run also activations, CUDA graphs, and memory used besides the weights.
        """
        pool = (
            f"{self.num_gpu_blocks} blocks x {shown_bytes(self.block_bytes)}, "
            f"{self.num_gpu_blocks * self.block_size} tokens in blocks of {self.block_size}"
        )
        left = self.free_bytes - self.pool_bytes - self.group_pool_bytes
        lines = [("weights", self.weight_bytes, "")]
        if (found := self.available) is not None:
            left -= found.activation_bytes + found.graph_bytes
            lines += [
                ("other use", found.used_bytes - self.weight_bytes, "CUDA, other processes"),
                ("activations", found.activation_bytes, "of the largest step"),
                ("CUDA graphs", found.graph_bytes, "of decode steps"),
            ]
        for group, size in zip(self.groups, self.group_bytes, strict=True):
            lines.append(_described(group, size))
        if self.block_bytes:
            lines.append(("KV cache", self.pool_bytes, pool))
        lines += [
            ("left free", left, ""),
            ("swap space", self.swap_bytes, "taken when requests are swapped out"),
        ]
        rows = [
            f"  {name:<11}{shown_bytes(size):>12}  {note}".rstrip() for name, size, note in lines
        ]
        return "\n".join(["memory:", *rows])


def _described(group: KVGroup, block_bytes: int) -> tuple[str, int, str]:
    """Name of a KV group, bytes of its pool, and what it holds."""
    size = group.num_gpu_blocks * block_bytes
    if group.kind == "state":
        return "states", size, f"of {group.num_gpu_blocks} sequences x {shown_bytes(block_bytes)}"
    blocks = f"{group.num_gpu_blocks} blocks x {shown_bytes(block_bytes)}"
    return "windows", size, f"{blocks}, of layers that see {group.window} tokens"


def plan_memory(
    *,
    block_bytes: int,
    block_size: int,
    weight_bytes: int,
    free_bytes: int,
    default_bytes: int | None = DEFAULT_KV_CACHE_BYTES,
    num_gpu_blocks: int | None = None,
    kv_cache_memory: int | None = None,
    max_model_len: int | None = None,
    swap_space: float | None = None,
    free_host_bytes: int,
    available: AvailableMemory | None = None,
    state_bytes: int = 0,
    max_num_seqs: int = 0,
    longest: int = 0,
    windows: WindowNeed | None = None,
) -> MemoryPlan:
    """Compute the number of KV blocks.

    Args:
        block_bytes: Bytes of one KV block over all layers, except those of ``windows``; 0 without
            layers that keep all keys, whose blocks then only name prefixes.
        block_size: Tokens per block.
        weight_bytes: Bytes of the loaded model.
        free_bytes: Free memory after loading.
        default_bytes: Default size of the KV cache; None is all that may be used.
        num_gpu_blocks: Number of blocks given; it overrides the size.
        kv_cache_memory: Size given; None is ``default_bytes``, less if less is free.
        max_model_len: Sequence length that was given explicitly: one such sequence must fit.
        swap_space: GiB for preempted requests; None is as much as the pool, at most 4 and at most
            half of the free host memory.
        free_host_bytes: Free host memory, including the pool if it is in host memory.
        available: Result of the profile run, without states; its size is then the limit.
        state_bytes: Recurrent states of one sequence.
        max_num_seqs: Maximum number of running sequences, each with a state.
        longest: Maximum number of tokens of a sequence; without layers that keep all keys every
            sequence gets blocks for as many, unless their number was given and is not that of
            ``windows``.
        windows: Requirements of layers with windows or chunks; they get at most half of the KV
            cache beside other layers, or as many blocks as the others if their number was given.
            If that is too little for a step, all layers share blocks.

    Raises:
        ConfigError: More than is free, or too little for one block or one such sequence.
    """
    state_pool_bytes = state_bytes * max_num_seqs
    if available is None:
        usable = int(free_bytes * _FREE_SHARE) - state_pool_bytes
    else:
        usable = available.num_bytes
    if state_pool_bytes:
        _check_states(state_bytes, max_num_seqs, usable + state_pool_bytes, kv_cache_memory)
    default = usable if default_bytes is None else min(default_bytes, usable)
    num_bytes = default if kv_cache_memory is None else kv_cache_memory - state_pool_bytes
    share = num_bytes // 2 if block_bytes else num_bytes
    num_window_blocks = _num_window_blocks(windows, share, num_gpu_blocks)
    if windows is not None and not num_window_blocks:  # then all layers share
        block_bytes, windows = block_bytes + windows.block_bytes, None
    if not block_bytes and (windows is not None or num_gpu_blocks is None):
        num_gpu_blocks = max_num_seqs * -(-longest // block_size)
    window_pool_bytes = 0 if windows is None else num_window_blocks * windows.block_bytes
    needed = -(-(max_model_len or 1) // block_size)
    if num_gpu_blocks is not None:
        wish, num_bytes = "num_gpu_blocks", num_gpu_blocks * block_bytes + window_pool_bytes
        num_blocks, needed = num_gpu_blocks, 1  # a given number may be small
    else:
        wish = "kv_cache_memory"
        num_blocks = (num_bytes - window_pool_bytes) // block_bytes
    if num_bytes > usable:
        raise ConfigError(
            f"{wish} requires a KV cache of {shown_bytes(num_bytes)}, but of "
            f"{shown_bytes(free_bytes)} free memory at most {shown_bytes(usable)} may be used"
        )
    if num_blocks < needed:
        what = "one block" if max_model_len is None else f"one sequence of {max_model_len} tokens"
        raise ConfigError(
            f"a KV cache of {shown_bytes(num_bytes)} holds {num_blocks} blocks of {block_size} "
            f"tokens ({shown_bytes(block_bytes)} each); {what} needs {needed} blocks, "
            f"{shown_bytes(needed * block_bytes)}: {_remedy(weight_bytes, available)}"
        )
    swap_bytes = _swap_bytes(swap_space, free_host_bytes)
    num_cpu_state_slots = min(max_num_seqs, swap_bytes // 2 // state_bytes) if state_bytes else 0
    # Window blocks in the same proportion as on the device.
    num_cpu_blocks = _num_swap_blocks(
        swap_bytes - num_cpu_state_slots * state_bytes,
        block_bytes + -(-window_pool_bytes // num_blocks),
        num_blocks if swap_space is None or not block_bytes else None,
    )
    groups: list[tuple[KVGroup, int]] = []
    if windows is not None:
        group = KVGroup(
            windows.kind,
            window=windows.window,
            num_gpu_blocks=num_window_blocks,
            num_cpu_blocks=num_cpu_blocks * num_window_blocks // num_blocks,
        )
        groups.append((group, windows.block_bytes))
    if state_bytes:
        group = KVGroup("state", num_gpu_blocks=max_num_seqs, num_cpu_blocks=num_cpu_state_slots)
        groups.append((group, state_bytes))
    return MemoryPlan(
        weight_bytes=weight_bytes,
        block_bytes=block_bytes,
        block_size=block_size,
        num_gpu_blocks=num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        free_bytes=free_bytes,
        available=available,
        groups=tuple(group for group, _ in groups),
        group_bytes=tuple(size for _, size in groups),
    )


def _num_window_blocks(need: WindowNeed | None, num_bytes: int, num_gpu_blocks: int | None) -> int:
    """Blocks that fit in the bytes, or the given number; 0 if a step might need more."""
    if need is None:
        return 0
    most = num_bytes // need.block_bytes if num_gpu_blocks is None else num_gpu_blocks
    return 0 if need.least_blocks > most else min(need.most_blocks, most)


def _check_states(state_bytes: int, max_num_seqs: int, usable: int, given: int | None) -> None:
    """Refuse states that leave no memory for keys and values.

    Raises:
        ConfigError: The states are too large.
    """
    most = usable if given is None else min(usable, given)
    if state_bytes * max_num_seqs >= most:
        raise ConfigError(
            f"layers of this model keep {shown_bytes(state_bytes)} of each sequence beside keys "
            f"and values, {shown_bytes(state_bytes * max_num_seqs)} for max_num_seqs, "
            f"{max_num_seqs}, and {shown_bytes(most)} may be used: lower max_num_seqs"
            + (" or raise kv_cache_memory" if given is not None else "")
        )


def _remedy(weight_bytes: int, available: AvailableMemory | None) -> str:
    """Options to change if the KV cache is too small, with the memory in use."""
    if available is None:
        return "raise kv_cache_memory or lower max_model_len"
    return (
        f"of {shown_bytes(available.total_bytes)} gpu_memory_utilization allows "
        f"{shown_bytes(available.budget_bytes)}, weights take {shown_bytes(weight_bytes)}, CUDA "
        f"and other processes {shown_bytes(available.used_bytes - weight_bytes)}, activations "
        f"{shown_bytes(available.activation_bytes)}, CUDA graphs "
        f"{shown_bytes(available.graph_bytes)}: raise gpu_memory_utilization, or lower "
        "max_model_len, max_num_batched_tokens or max_num_seqs"
    )


def _num_swap_blocks(num_bytes: int, block_bytes: int, most: int | None) -> int:
    num_blocks = num_bytes // block_bytes if block_bytes else num_bytes
    return num_blocks if most is None else min(most, num_blocks)


def _swap_bytes(swap_space: float | None, free_bytes: int) -> int:
    if swap_space is None:
        return max(0, min(_DEFAULT_SWAP_BYTES, free_bytes // 2))
    num_bytes = int(swap_space * GIB)
    if num_bytes > free_bytes:
        raise ConfigError(
            f"swap_space requires {shown_bytes(num_bytes)} of host memory, of which "
            f"{shown_bytes(free_bytes)} are free"
        )
    return num_bytes


def free_host_bytes() -> int:
    """Memory available to this process: the machine's, or its control group's if less."""
    free = _available_bytes()
    for limit, used in _CONTROL_GROUP_FILES:
        limit_bytes, used_bytes = _number_in(Path(limit)), _number_in(Path(used))
        if limit_bytes is not None and used_bytes is not None:
            cached = _file_cache_bytes(Path(used).with_name("memory.stat"))
            free = min(free, max(limit_bytes - used_bytes + cached, 0))
    return free


def shown_bytes(num_bytes: int) -> str:
    """Format a number of bytes, such as "1.00 GiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:  # noqa: PLR2004  # next unit
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def _available_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux: total memory, as an approximation
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None  # "max" is no limit


def _file_cache_bytes(path: Path) -> int:
    """Bytes of reclaimable page cache, which count as used."""
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except OSError:
        return 0
    prefix = "total_" if "total_inactive_file" in fields else ""
    return sum(int(fields.get(f"{prefix}{kind}_file", "0")) for kind in ("active", "inactive"))
