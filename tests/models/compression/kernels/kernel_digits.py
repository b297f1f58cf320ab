"""What the kernels of one library give: kernel_digits.py LIBRARY OUTPUT."""

import sys

import numpy as np
import tensorflow as tf


def digits(operations):
    generator = np.random.default_rng(0)
    gradient, residual = (generator.normal(size=(333, 77)).astype(np.float32) for _ in range(2))
    scale, results = np.float32(0.37), {}

    def keep(name, outputs):
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        for number, output in enumerate(outputs):
            results[f"{name} {number}"] = output.numpy()
        return outputs

    bits, upper, lower, _, _ = keep("columns", operations.groundswell_encode_columns(gradient, residual, scale, 3))
    keep("columns decoded", operations.groundswell_decode_columns(bits, upper, lower, 333, 77))
    keep("columns' mean", operations.groundswell_mean_columns(bits, upper, lower, 333))
    places, values, _, _ = keep(
        "largest", operations.groundswell_encode_largest(gradient, residual, scale, 3, 8560, 300)
    )
    keep("largest decoded", operations.groundswell_decode_largest(places, values, 8560, 333 * 77))
    keep("largest's mean", operations.groundswell_mean_largest(places, values, 8560))
    factor = generator.normal(size=(77, 5)).astype(np.float32)
    matrix, products, _ = keep("project", operations.groundswell_project(gradient, residual, scale, factor))
    basis, own, _ = keep("improve", operations.groundswell_improve(matrix, products))
    keep("expand", operations.groundswell_expand(basis, own))
    return results


if __name__ == "__main__":
    np.savez(sys.argv[2], **digits(tf.load_op_library(sys.argv[1])))
