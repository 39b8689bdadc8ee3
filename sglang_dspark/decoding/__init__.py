"""How a drafted block becomes committed tokens: sampling, acceptance, scheduling, and the Round event that reports it.

Nothing here knows which engine computed the logits. `rounds` holds the event, `sampling` the target distribution,
`verify` the acceptance rules, `schedule` how much of a block is worth verifying.
"""
