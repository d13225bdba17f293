"""What a kernel library does whose CUDA runtime is another one: the system's loader refuses, with an OSError."""

import ctypes

ctypes.CDLL("libacme_that_is_not_there.so.4")
