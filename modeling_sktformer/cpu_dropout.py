"""Dropout for processors, where drawing random numbers takes most of its time: one number serves four values."""

import torch


NUM_LEVELS = 1 << 16  # of the uniform integer that is compared with a threshold, to drop a value


def drop_values(inputs: torch.Tensor, probability: float) -> torch.Tensor:
    """
    Zero each value with a probability and scale the others, so that the expectation is the input.

    PyTorch draws a number of 64 bits for each value; this reads four values' worth from it, so the probability is a
    multiple of 2^-16 (0.1 becomes 0.100006). Numbers come from PyTorch's CPU generator and follow its seed. Takes
    values on the CPU, of any shape.
    """
    num_dropped = min(round(probability * NUM_LEVELS), NUM_LEVELS - 1)
    # Empty as the inputs are, so that `torch.func.vmap` draws for each sample.
    numbers = inputs.new_empty(-(-inputs.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
    levels = numbers.view(torch.int16)[: inputs.numel()].view(inputs.shape)
    kept = levels >= num_dropped - NUM_LEVELS // 2
    scale = torch.tensor(NUM_LEVELS / (NUM_LEVELS - num_dropped), dtype=inputs.dtype, device=inputs.device)
    return inputs * (kept * scale)
