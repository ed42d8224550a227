"""The element types of tensors in GGUF files, with the size of one block.

The table is not taken from the gguf package: its import costs every command that reads a header about 0.1 s, it
counts 40 bytes for Q8_1 where ggml-common.h has 36, and older releases lack the newest types. A test compares the
two.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgmlType:
    """One element type: `block_bytes` bytes hold `block_items` consecutive elements of a row."""

    name: str
    block_items: int
    block_bytes: int

    @property
    def bits(self) -> float:
        """Bits of an element."""
        return 8 * self.block_bytes / self.block_items

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` elements, which must be a whole number of blocks."""
        return elements // self.block_items * self.block_bytes


# Ids and block layouts of ggml.h and ggml-common.h, without the ids that llama.cpp no longer reads.
GGML_TYPES: dict[int, GgmlType] = {
    0: GgmlType("F32", 1, 4),
    1: GgmlType("F16", 1, 2),
    2: GgmlType("Q4_0", 32, 18),
    3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22),
    7: GgmlType("Q5_1", 32, 24),
    8: GgmlType("Q8_0", 32, 34),
    9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84),
    11: GgmlType("Q3_K", 256, 110),
    12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176),
    14: GgmlType("Q6_K", 256, 210),
    15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66),
    17: GgmlType("IQ2_XS", 256, 74),
    18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50),
    20: GgmlType("IQ4_NL", 32, 18),
    21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82),
    23: GgmlType("IQ4_XS", 256, 136),
    24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2),
    26: GgmlType("I32", 1, 4),
    27: GgmlType("I64", 1, 8),
    28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56),
    30: GgmlType("BF16", 1, 2),
    34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66),
    39: GgmlType("MXFP4", 32, 17),
    40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18),
    42: GgmlType("Q2_0", 64, 18),
}
GGML_IDS = {kind.name: number for number, kind in GGML_TYPES.items()}
GGML_NAMES = {kind.name: kind for kind in GGML_TYPES.values()}
