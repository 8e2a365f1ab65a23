"""The KV memory of a `LeapEngine`: whole prompts at a time instead of block by block."""

from collections import OrderedDict

from simulator.requests import Job


class BlockCache:
    """Like `KVCache` of `vllm_omni_plugin.sim`, for sequences that grow between two steps.

    Blocks of answers are counted together, exact to half a block per sequence, and can be reused when the answer ends.

    Args:
        block_size: tokens in a block.
        keeps: whether unused blocks stay cached.
    """

    def __init__(self, blocks: int, block_size: int, keeps: bool) -> None:
        self._blocks = blocks
        self._size = block_size
        self._keeps = keeps
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._reserved = 0
        self._unshared = 0
        self._changes: dict[int, bool] | None = None

    def record_changes(self) -> None:
        """Record stored and evicted keys from now on, for `take_changes`."""
        self._changes = {}

    def take_changes(self) -> tuple[list[int], list[int]]:
        """Stored and evicted keys since the last call. Each key is in at most one of the lists."""
        changes, self._changes = self._changes or {}, {}
        return [key for key, stored in changes.items() if stored], [
            key for key, stored in changes.items() if not stored
        ]

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return min(1.0, (len(self._users) + self._unshared) / self._blocks)

    @property
    def free(self) -> int:
        """Blocks that no admitted sequence can come to need."""
        return self._blocks - len(self._users) - self._reserved

    def matched(self, keys: list[int], prompt_tokens: int) -> int:
        """Leading blocks of a prompt that could be reused now; never the whole prompt."""
        users, idle = self._users, self._idle
        count = 0
        for key in keys[: (prompt_tokens - 1) // self._size]:
            if key not in users and key not in idle:
                break
            count += 1
        return count

    def admit(self, job: Job) -> bool:
        """Reserve all blocks that a job may need, and use cached ones. False if there is no room."""
        matched = self.matched(job.keys, job.prompt_tokens) if self._keeps else 0
        users = self._users
        needed = -(-(job.prompt_tokens + job.output_tokens) // self._size)
        new = needed - sum(key in users for key in job.keys[:matched])
        if len(users) + self._reserved + new > self._blocks:
            return False
        job.reserved = needed - matched
        self._reserved += job.reserved
        self._use(job, matched)
        job.computed = job.cached_tokens = matched * self._size
        return True

    def computed(self, job: Job) -> None:
        """Share the complete blocks of a job's computed tokens."""
        if self._keeps:
            before = job.shared
            self._use(job, min(job.computed // self._size, len(job.keys)))
            self._reserved -= job.shared - before
            job.reserved -= job.shared - before

    def release(self, job: Job, tokens: int) -> None:
        """Release a job that has ended with so many computed tokens. Its last block is evicted first."""
        job.computed = tokens
        self.computed(job)
        self._reserved -= job.reserved
        users = self._users
        for key in reversed(job.keys[: job.shared]):
            left = users[key] - 1
            if left:
                users[key] = left
            else:
                del users[key]
                self._idle[key] = None

    def fit(self, unshared: int) -> None:
        """Evict unused blocks that do not fit beside the used ones.

        Args:
            unshared: used blocks that are not in the cache.
        """
        self._unshared = unshared
        excess = len(self._users) + unshared + len(self._idle) - self._blocks
        for _ in range(min(excess, len(self._idle))):
            key, _ = self._idle.popitem(last=False)
            if self._changes is not None:
                self._note(key, stored=False)

    def _use(self, job: Job, count: int) -> None:
        users, idle = self._users, self._idle
        for key in job.keys[job.shared : count]:
            if key in users:
                users[key] += 1
                continue
            users[key] = 1
            if key in idle:
                del idle[key]
            elif self._changes is not None:
                self._note(key, stored=True)
        job.shared = count

    def _note(self, key: int, stored: bool) -> None:
        """Record a change; it cancels the opposite change of the same key."""
        assert self._changes is not None
        if self._changes.pop(key, stored) is stored:
            self._changes[key] = stored
