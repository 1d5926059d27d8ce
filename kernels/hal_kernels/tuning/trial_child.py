"""The compiling process of one trial: `python -m hal_kernels.tuning.trial_child` with five
arguments, KERNEL TARGET SHAPE CONFIGURATION RESULT_FD, the fourth as JSON.

One line of JSON goes to the result channel: the evidence of that configuration's machine code.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict

from hal_kernels.aot.catalogue import find_kernel
from hal_kernels.aot.compile_child import compile_variant
from hal_kernels.aot.compiler_process import MachineFailureError, leave_for_machine_failure
from hal_kernels.aot.targets import find_target
from hal_kernels.tuning.shapes import parse_shape
from hal_kernels.tuning.tunable_kernels import find_tunable


def main() -> None:
    """Compiles, and reports what the code is."""
    name, arch, text, configuration, descriptor = sys.argv[1:]
    warnings.simplefilter("ignore")
    kernel, tunable, target = find_kernel(name), find_tunable(name), find_target(arch)
    shape = parse_shape(
        text, size_names=tunable.size_names, forms=tunable.forms, dtypes=tunable.dtypes(target)
    )
    variants = kernel.variants(target)
    variant = tunable.variant(variants, target, shape, json.loads(configuration))
    try:
        found = compile_variant(kernel, variant, target)
    except MachineFailureError as failure:
        leave_for_machine_failure(failure)
    with os.fdopen(int(descriptor), "w", encoding="utf-8") as channel:
        channel.write(json.dumps(asdict(found)) + "\n")


if __name__ == "__main__":
    main()
