import torch
from torch import nn
def are_plain_linear(*modules):
    return all(type(m) is nn.Linear for m in modules)
