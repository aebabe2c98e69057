"""Host memory in huge pages, for large arrays with random access."""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pagedserve._core.cpu import advise_huge_pages

HUGE_PAGE: Final = 1 << 21


def bytes_in_huge_pages(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate uninitialized bytes, in pages of 2 MiB if available, aligned to 64 bytes at least.

    The processor's TLB is too small for 4 KiB pages in random reads of a large array, so that each
    block costs a miss; with huge pages it does not.  Unwritten pages take no memory.
    """
    alignment = 64 if num_bytes < HUGE_PAGE else HUGE_PAGE
    memory = np.empty(num_bytes + alignment, np.uint8)
    first = -memory.ctypes.data % alignment
    if alignment == HUGE_PAGE:
        advise_huge_pages(memory.ctypes.data + first, num_bytes)
    return memory[first : first + num_bytes]
