"""Everything that needs a CUDA device, as one script that runs offline in under eight minutes: `make gpu-check`.

`parts` runs the parts one after the other, each within its own time, and keeps what a part that fails had found by
then. `numerics` compares a device with recorded runs and with the CPU, `costs` times models of published shapes with
random weights from `shapes`, with and without the CUDA graphs of `graphs`, and `race` decodes a real pair.
"""
