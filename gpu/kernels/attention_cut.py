"""How a pass of paged attention is cut into programs on CUDA, decided from the shapes that the host knows.

Owns sizes of tiles, numbers of splits, and the working memory that follows from them. Never sees a length, and knows
no Triton: the kernels are in `triton_attention`.
"""

from typing import NamedTuple

QUERY_TILES = (16, 32, 64)  # tokens x query heads of a group; 16 is the least that tensor cores take
PROGRAMS = 512  # enough for every multiprocessor of a large GPU to have several
SPLITS_MAX = 32
SPLIT_KEYS = 256  # fewer keys are not worth a split


class Cut(NamedTuple):
    """How a pass is cut into programs, decided from shapes alone."""

    queries: int  # tile: tokens x query heads of one key/value head
    blocks: int  # of all rows
    row_blocks: int  # of each row, if all rows have the same; otherwise 0
    splits: int  # power of two

    @classmethod
    def of(cls, tokens: int, rows: int, longest: int, context: int, group: int, kv_heads: int, itemsize: int) -> "Cut":
        """The cut of a pass over `tokens` of `rows` rows, with up to `longest` tokens and `context` keys each.

        group: query heads of each key/value head. itemsize: bytes of a number of the cache.
        """
        tiles = tiles_of(itemsize)
        queries = next((size for size in tiles if size >= longest * group), tiles[-1])
        at_once = queries // group
        row_blocks = -(-longest // at_once) if rows * longest == tokens else 0
        blocks = rows * row_blocks or tokens // at_once + rows
        splits = min(SPLITS_MAX, PROGRAMS // (blocks * kv_heads), -(-context // SPLIT_KEYS))
        return cls(queries, blocks, row_blocks, 1 << max(0, splits.bit_length() - 1))


def variants(context: int, itemsize: int) -> list[Cut]:
    """One cut of no programs for each variant of the kernels that passes over rows of up to `context` keys need."""
    splits = (1, 2) if context > SPLIT_KEYS else (1,)
    return [Cut(queries, 0, even, split) for queries in tiles_of(itemsize) for even in (0, 1) for split in splits]


def scratch_floats(dim: int) -> int:
    """Working memory of a PagedAttention in float32, whatever the pass: splits are made only of few programs."""
    return PROGRAMS * QUERY_TILES[-1] * (dim + 2)


def tiles_of(itemsize: int) -> tuple[int, ...]:
    """Tiles of queries. Products of float32 are made by the ordinary units, which take all operands from registers:
    the smallest tile is all that fits there.
    """
    return QUERY_TILES[:1] if itemsize == 4 else QUERY_TILES


def stages_of(itemsize: int) -> int:
    """Steps of the loop whose loads are under way at once. Products of float32 need the registers for themselves."""
    return 1 if itemsize == 4 else 3


def keys_of(queries: int, dim: int, itemsize: int) -> int:
    """Keys of one step of the loop: as many as the registers of every target hold beside a tile of `queries`."""
    if itemsize == 4:
        return min(64, 2048 // dim)
    return 64 if queries == 16 else 32
