"""hyper_resume: save and resume PyTorch training exactly.

Nothing heavy is imported here: ``import hyper_resume`` does not import torch.
"""

__version__ = "0.2.0"
