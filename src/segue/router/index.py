"""The prefix index: which workers probably have the KV of a prompt's beginning.

A router has no tokenizer, so prompts are compared by the bytes of their JSON, as they stand in the request.
Equal bytes are equal tokens, and a chat's next turn begins with the bytes of the turn before. Prompts are cut
into blocks of 256 bytes. A block's key is a hash of its bytes and of the key before it, so that it stands for
everything up to its end. For each key there is a set of workers, as the bits of an integer.

What the index says is a guess: a worker may have evicted the KV. A wrong guess costs time and never changes
an answer, since the worker compares the tokens themselves.

Keys are Python's own hashes: SipHash with a key that is drawn at random, so that no client can make
prompts that collide, and 64 bits, so that none do by chance. They mean nothing in another process, except
among the serving processes of one router: their coordinator draws one key for all (``PYTHONHASHSEED``).
The keys of 32 KiB take 25 to 37 µs, with BLAKE2b 84 to 100 µs; looking them up takes 8 µs more.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

BLOCK = 256  # bytes
CAPACITY = 1 << 18  # blocks per generation
MOST_BLOCKS = 1 << 12  # of a prompt; what is behind its first MiB is not compared, as 16 MiB would take 15 ms
MOST_RETIRED = 64  # bits that wait to be used again, before the generations are turned for them

Keys = list[int]


def keys_of(prompt: bytes, salt: bytes = b"") -> Keys:
    """Returns the keys of the full blocks of a prompt's JSON.

    Its last byte is left out: the bracket or the quotation mark there is not part of what a longer prompt
    begins with. Prompts of another ``salt`` have other keys, as they share no KV.
    """
    key, keys = hash(salt) if salt else 0, []
    for start in range(0, min(len(prompt) - BLOCK, BLOCK * MOST_BLOCKS), BLOCK):
        key = hash((key, prompt[start : start + BLOCK]))
        keys.append(key)
    return keys


class PrefixIndex:
    """Blocks of prompts, and the workers that probably have their KV.

    There are two generations of blocks. A block that is added goes to the younger one; when that is full, the
    older one is dropped, and the younger one takes its place. So a block that is used stays.

    What a worker has is lost when its prefix cache becomes another one (:meth:`observe`) and when it leaves
    (:meth:`forget`). The worker then gets a new bit, and the old bit is used again only once both generations
    that may hold it have been dropped. So neither costs more than a few operations on integers.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """Start empty; ``capacity``: blocks per generation."""
        self._capacity = capacity
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._caches: dict[str, Hashable] = {}  # worker -> the name of its prefix cache
        self._bits: dict[str, int] = {}  # worker -> 1 << its bit
        self._workers: dict[int, str] = {}  # the same, the other way round
        self._live = 0  # the bits of all workers
        self._free: list[int] = []
        self._retired: list[int] = []  # since the generations were last turned
        self._retired_before: list[int] = []  # before that: the older generation may hold them
        self._num_bits = 0

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def match(self, keys: Sequence[int]) -> dict[str, int]:
        """Returns the bytes that each worker has of the prompt with these keys; others have none."""
        young, old, found = self._young, self._old, self._live
        ends: list[tuple[int, int]] = []  # bits of workers that lack block n, and n
        number = 0
        for number, key in enumerate(keys):
            mask = young.get(key)
            if mask is None:
                mask = old.get(key, 0)
            if found & ~mask:
                ends.append((found & ~mask, number))
                found &= mask
                if not found:
                    break
        if found:
            ends.append((found, len(keys)))
        return {worker: number * BLOCK for mask, number in ends if number for worker in self._of(mask)}

    def observe(self, worker: str, cache: Hashable) -> None:
        """Note which prefix cache a worker has; if it is another one than before, it holds nothing yet.

        Args:
            worker: its id.
            cache: names the cache, as `segue.router.fleet.CacheName` does.
        """
        if worker not in self._bits:
            self._new_bit(worker)
        elif self._caches[worker] != cache:
            self.forget(worker)
            self._new_bit(worker)
        self._caches[worker] = cache

    def add(self, keys: Sequence[int], worker: str, cache: Hashable) -> None:
        """Note that a worker has, or will soon have, the KV of these blocks.

        Nothing is noted if the worker has another cache by now than ``cache``, the one it had when the prompt
        was sent there.
        """
        bit = self._bits.get(worker)
        if bit is None or self._caches[worker] != cache:
            return
        young, old, live = self._young, self._old, self._live
        for key in keys:
            mask = young.get(key)
            if mask is None:
                mask = old.get(key, 0)
            young[key] = mask & live | bit  # a retired bit must not pass from one generation to the next
        if len(young) >= self._capacity:
            self._turn()

    def correct(self, keys: Sequence[int], worker: str, predicted: int, cached: int) -> None:
        """Take back what was claimed of a worker that had less of a prompt than was predicted.

        Args:
            keys: of the prompt.
            worker: that computed it.
            predicted: the bytes that it was expected to have, as :meth:`match` gave them.
            cached: the bytes that it had.
        """
        bit = self._bits.get(worker)
        if bit is None or cached >= predicted:
            return
        for key in keys[cached // BLOCK :]:
            for generation in (self._young, self._old):
                if mask := generation.get(key, 0) & bit:
                    generation[key] ^= mask

    def forget(self, worker: str) -> None:
        """Drop everything that is known of a worker that has left."""
        bit = self._bits.pop(worker, None)
        if bit is None:
            return
        del self._workers[bit], self._caches[worker]
        self._live ^= bit
        self._retired.append(bit)
        if len(self._retired) >= MOST_RETIRED:
            self._turn()

    def _of(self, mask: int) -> list[str]:
        workers = []
        while mask:
            bit = mask & -mask
            workers.append(self._workers[bit])
            mask ^= bit
        return workers

    def _new_bit(self, worker: str) -> None:
        if self._free:
            bit = self._free.pop()
        else:
            bit = 1 << self._num_bits
            self._num_bits += 1
        self._bits[worker] = bit
        self._workers[bit] = worker
        self._live |= bit

    def _turn(self) -> None:
        """Drop the older generation; no block holds the bits that were retired before the last turn."""
        self._old, self._young = self._young, {}
        self._free += self._retired_before
        self._retired_before, self._retired = self._retired, []
