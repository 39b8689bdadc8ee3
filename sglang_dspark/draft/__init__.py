"""The DSpark draft model: a parallel backbone that sees the target's features, a small sequential head, a confidence
head.

`config` is the one normalised description of a draft, whatever format it came from. `rope` makes position tables,
`backbone` turns an anchor and mask tokens into hidden states in one pass, `heads` adds the sequential bias and predicts
survival, `model` joins them behind observe, draft and crop, and `load` builds a model from a checkpoint for one target,
or says why it cannot.
"""
