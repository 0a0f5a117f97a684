"""Counter-based random numbers: each number is a pure function of its purpose; there is no generator state.

So the numbers of a rollout do not depend on the number of ranks, the batch of a prompt, or a restart.

The function is Philox4x32-10 (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"), which maps four
32-bit counter words and two 32-bit key words to four random words. The layout is a contract with any kernel:

    key      k0, k1   low and high word of the 8-byte little-endian BLAKE2b digest of the text "<seed>/<purpose>"
    counter  c0, c1   low and high word of the prompt id, 0 <= id < 2**63
             c2       position, 0 <= position < 2**32
             c3       epoch << 12 | sample index, 0 <= epoch < 2**20, 0 <= sample index < 2**12
    result   u = ((w0 >> 6 << 26 | w1 >> 6) + 0.5) / 2**52 in float64, never 0 and never 1; w2, w3 are unused

In Triton this is `tl.philox(key, c0, c1, c2, c3)` with the 64-bit key from `derive_key` and its default ten rounds.
"""

import hashlib

import torch
from torch import Tensor

PHILOX_ROUNDS = 10
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio, sqrt(3) - 1
WORD_BITS = 32
WORD_MASK = 0xFFFFFFFF
SAMPLE_BITS = 12
EPOCH_BITS = 20

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Run ten rounds of Philox on int64 tensors that hold words 0 <= w < 2**32; the counter words broadcast."""
    assert all(word.dtype == torch.int64 for word in counter), [word.dtype for word in counter]
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(PHILOX_ROUNDS):
        high0, low0 = _multiply(PHILOX_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(PHILOX_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 = (k0 + PHILOX_KEY_STEPS[0]) & WORD_MASK
        k1 = (k1 + PHILOX_KEY_STEPS[1]) & WORD_MASK
    return c0, c1, c2, c3


def uniforms(
    *, seed: int, purpose: str, epoch: int, prompt_ids: Tensor, sample_index: Tensor, position: int | Tensor
) -> Tensor:
    """Return float64 numbers in the open interval (0, 1), one for each (prompt id, sample index, position).

    The three are int64 and broadcast: (N,) with an int position gives (N,); (N, 1) with positions (T,) gives (N, T).
    One call can draw a block of T decode steps this way, with one range check that waits for the device instead of T.
    Numbers of different purposes ("rollout", "eval", ...) are independent. Raises ValueError out of range.
    """
    position = torch.as_tensor(position, device=prompt_ids.device)
    _check_range("epoch", torch.tensor(epoch), EPOCH_BITS)
    _check_range("prompt id", prompt_ids, 63)
    _check_range("sample index", sample_index, SAMPLE_BITS)
    _check_range("position", position, WORD_BITS)
    stream = sample_index | (epoch << SAMPLE_BITS)
    counter = (prompt_ids & WORD_MASK, prompt_ids >> WORD_BITS, position, stream)
    key = derive_key(seed, purpose)
    first, second, _, _ = philox4x32(counter, (key & WORD_MASK, key >> WORD_BITS))
    return words_to_uniform(first, second)


def key_and_stream(seed: int, purpose: str, epoch: int, prompt_id: int, sample_index: int) -> tuple[int, int]:
    """Return the key, as a signed number of 64 bits, and counter word c3 of a response's numbers, for a kernel.

    Raises:
        ValueError: a number is out of range.
    """
    ranges = (("epoch", epoch, EPOCH_BITS), ("prompt id", prompt_id, 63), ("sample index", sample_index, SAMPLE_BITS))
    for name, number, bits in ranges:
        if not 0 <= number < 1 << bits:
            raise ValueError(f"{name} must be in [0, 2**{bits}), got {number}")
    key = derive_key(seed, purpose)
    return key - (key >> 63 << 64), epoch << SAMPLE_BITS | sample_index


def permutation(n: int, *, seed: int, purpose: str, epoch: int) -> Tensor:
    """Return a random order of 0..n-1, (n,) int64 on the CPU: indices sorted by their uniform, ties by index.

    Index i is used as the prompt id; a separate purpose ("shuffle") makes the numbers independent of `uniforms`.
    """
    drawn = uniforms(
        seed=seed, purpose=purpose, epoch=epoch, prompt_ids=torch.arange(n), sample_index=torch.tensor(0), position=0
    )
    return drawn.argsort(stable=True)


def derive_key(seed: int, purpose: str) -> int:
    """Return the 64-bit Philox key of (seed, purpose); a hash, so that neighbouring seeds are independent."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little")


def words_to_uniform(first: Tensor, second: Tensor) -> Tensor:
    """Map 52 random bits to a float64 in (0, 1), the centre of one of 2**52 cells; 53 bits could round up to 1."""
    bits = (first >> 6 << 26) | (second >> 6)
    return (bits.double() + 0.5) * 2.0**-52


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the words of the 64-bit product; it wraps around in int64, the mask drops the shifted-in sign bits."""
    product = word * multiplier
    return (product >> WORD_BITS) & WORD_MASK, product & WORD_MASK


def _check_range(name: str, number: Tensor, bits: int) -> None:
    assert number.dtype == torch.int64, (name, number.dtype)
    outside = (number < 0) if bits == 63 else (number >> bits) != 0  # a negative number shifts to -1
    if outside.any():
        raise ValueError(f"{name} must be in [0, 2**{bits}), got {int(number[outside].flatten()[0])}")


def seed_dropout(seed: int, *, step: int, rank: int) -> None:
    """Set torch's generators for the dropout of an optimizer step, as a function of seed, step and rank."""
    torch.manual_seed(derive_key(seed, f"dropout/{step}/{rank}"))
