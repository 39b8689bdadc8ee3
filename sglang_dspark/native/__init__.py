"""The compiled mode on CPUs: one C++ file, built at first use, that decodes, drafts and verifies in bfloat16.

`kernel.cpp` holds the arithmetic, `build` makes and loads the library, `decoder` lays out weights and caches for it,
and `draft` is a draft model that runs on it. Rows are computed the same to the last bit however many of them there
are, so a verified block and plain decoding cannot disagree.
"""
