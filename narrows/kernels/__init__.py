"""What torch lacks on a CPU. `base.Kernels` is the contract, `reference` its plain torch twin, `native` the fast one."""
